//! `ebbtide doctor`: the table, the file, what is refused.

mod common;

use std::fs;
use std::path::Path;

use common::{Place, keys, names, text};
use insta::assert_snapshot;
use serde_json::Value;

/// A quick look at the folder for temporary files, which has to go well.
fn look(place: &Place, args: &[&str]) -> (String, String) {
    let output = place.run(&[&["doctor", "--quick"], args].concat());
    assert!(output.status.success(), "{}", text(&output.stderr));
    assert_eq!(names(place.spill.path()), [""; 0], "left in the folder");
    (text(&output.stdout), text(&output.stderr))
}

/// The table with numbers as `#`, and what depends on the machine left out.
fn shape_of(table: &str) -> String {
    let mut shape = String::new();
    for line in table.lines() {
        let (name, found) = line.split_at(14);
        let found = match name.trim() {
            "memory" | "spill folder" | "direct I/O" | "io_uring" | "CUDA driver" => {
                "..".to_owned()
            }
            _ => found.to_owned(),
        };
        let mut last = ' ';
        shape.push_str(name);
        for c in found.chars() {
            let c = if c.is_ascii_digit() || c == '.' && last == '#' { '#' } else { c };
            if c != '#' || last != '#' {
                shape.push(c);
            }
            last = c;
        }
        shape.push('\n');
    }
    shape
}

#[test]
fn a_line_for_each_finding() {
    let place = Place::new();
    // The system's folder for temporary files may be in RAM.
    let on_disk = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let (table, _) = look(&place, &["--dir", on_disk.path().to_str().unwrap()]);
    assert!(table.contains(&format!("spill folder  {} (", on_disk.path().display())), "{table}");
    assert!(
        table.starts_with("memory        ") && table.contains("; this process may use "),
        "{table}"
    );
    assert_snapshot!(shape_of(&table), @r"
    memory        ..
    memory copy   # GB/s by one thread
    spill folder  ..
    direct I/O    ..
    write         # GB/s, # KiB in # us
    read          # GB/s, # KiB in # us
    io_uring      ..
    CUDA driver   ..
    full use      # TB written a day, # TB a year, if all day long bytes go out and come back
    SSD wear      an SSD rated for # TB written would have had them after # days of that
    ");
}

#[test]
fn the_file_has_every_field_and_no_other() {
    let place = Place::new();
    let on_disk = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    look(&place, &["--dir", on_disk.path().to_str().unwrap(), "--json", "r"]);
    let report = place.json("r");
    let all = "advice command cuda folder memory quick schema wear";
    assert_eq!(keys(&report).join(" "), all);
    assert_eq!((&report["schema"], &report["command"]), (&Value::from(1), &Value::from("doctor")));
    assert_eq!(report["quick"], true);
    let fields = "available_bytes copy_gb_per_s machine_bytes may_use_bytes";
    assert_eq!(keys(&report["memory"]).join(" "), fields);
    let fields = "direct_io file_system free_bytes in_ram io_uring measured_bytes path read_4k_us \
        read_gb_per_s why_not_direct why_not_io_uring write_4k_us write_gb_per_s";
    assert_eq!(keys(&report["folder"]).join(" "), fields);
    assert_eq!(keys(&report["cuda"]), ["devices", "driver", "library", "names"]);
    let fields = "days_to_rating rated_tbw written_tb_per_day written_tb_per_year";
    assert_eq!(keys(&report["wear"]).join(" "), fields);
    let folder = &report["folder"];
    assert_eq!(folder["path"].as_str(), on_disk.path().to_str());
    assert_eq!(folder["direct_io"], folder["why_not_direct"].is_null());
    assert_eq!(folder["io_uring"], folder["why_not_io_uring"].is_null());
    for speed in ["write_gb_per_s", "read_gb_per_s", "write_4k_us", "read_4k_us"] {
        assert!(folder[speed].as_f64() > Some(0.), "{speed}");
    }
    assert!(report["memory"]["copy_gb_per_s"].as_f64() > Some(0.));
    assert!(report["memory"]["may_use_bytes"].as_u64() > Some(1 << 20));
}

#[test]
fn a_folder_in_memory_is_warned_of_and_does_not_wear() {
    let shared = Path::new("/dev/shm");
    let mounts = fs::read_to_string("/proc/self/mountinfo").unwrap();
    if !mounts.lines().any(|line| line.contains(" /dev/shm ") && line.contains(" - tmpfs ")) {
        // Nothing to look at.
        return;
    }
    let place = Place::new();
    let folder = tempfile::tempdir_in(shared).unwrap();
    let dir = folder.path().to_str().unwrap();
    let (table, said) = look(&place, &["--dir", dir, "--json", "r"]);
    assert!(table.contains(&format!("spill folder  {dir} (tmpfs), ")), "{table}");
    assert!(table.contains("\ndirect I/O    no: it is RAM\n"), "{table}");
    assert!(!table.contains("SSD wear"), "{table}");
    let advice = format!(
        "note: {dir} is RAM (tmpfs): swapping there saves nothing; name a folder on a disk\n"
    );
    assert!(said.starts_with(&advice), "{said}");
    let report = place.json("r");
    assert!(report["wear"].is_null());
    assert_eq!(report["folder"]["in_ram"], true);
    assert_eq!(names(folder.path()), [""; 0]);
}

#[test]
fn an_empty_name_of_the_temporary_folder_counts_as_none() {
    let place = Place::new();
    let output = place.command(&["doctor", "--quick"]).env("TMPDIR", "").output().unwrap();
    assert!(output.status.success(), "{}", text(&output.stderr));
    let table = text(&output.stdout);
    let folder = table.lines().find_map(|line| line.strip_prefix("spill folder  ")).unwrap();
    assert!(folder.starts_with("/tmp (") || folder.starts_with("/var/tmp ("), "{folder}");
}

fn refused(args: &[&str]) -> String {
    let place = Place::new();
    fs::write(place.path().join("file"), "x").unwrap();
    let output = place.run(&[&["doctor", "--quick"], args].concat());
    assert_eq!(output.status.code(), Some(2));
    assert_eq!(text(&output.stdout), "");
    assert_eq!(names(place.path()), ["file"]);
    text(&output.stderr)
}

#[test]
fn folders_and_files_that_can_not_be_used_are_refused() {
    assert_snapshot!(refused(&["--dir", "missing"]), @r"
    error: can't spill to the folder missing: No such file or directory (os error 2)
    hint: name an existing, writable folder with --dir
    ");
    assert_snapshot!(refused(&["--dir", "file"]), @r"
    error: can't spill to the folder file: Not a directory (os error 20)
    hint: name an existing, writable folder with --dir
    ");
    assert_snapshot!(refused(&["--json", "missing/x"]), @r"
    error: --json can't write missing/x: No such file or directory (os error 2)
    hint: name a file in an existing, writable folder with --json
    ");
    assert_snapshot!(refused(&["--json", "file/"]), @r"
    error: --json can't write file/: Not a directory (os error 20)
    hint: name a file in an existing, writable folder with --json
    ");
    assert_snapshot!(refused(&["--json", "new/"]), @r"
    error: --json can't write new/: it is the name of a folder
    hint: name a file in an existing, writable folder with --json
    ");
    assert_snapshot!(refused(&["--fast"]), @r"
    error: unexpected argument '--fast' found
    hint: `ebbtide doctor --help` lists what can be given
    ");
}

#[test]
fn a_folder_that_may_not_be_written_is_refused() {
    if rustix::process::geteuid().is_root() {
        // The superuser may write everywhere.
        return;
    }
    let said = refused(&["--dir", "/"]);
    assert!(said.starts_with("error: can't spill to the folder /: "), "{said}");
}
