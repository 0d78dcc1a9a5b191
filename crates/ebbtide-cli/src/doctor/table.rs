//! The findings as a table: what was looked at, what was found.

use ebbtide_core::size;

use super::cuda::Cuda;
use super::findings::Findings;
use super::folder::Folder;
use super::memory::Memory;
use super::wear::Wear;

/// One line a finding.
pub(super) fn render(findings: &Findings) -> String {
    let folder = &findings.folder;
    let mut rows = vec![
        ("memory", memory(&findings.memory)),
        ("memory copy", speed(findings.memory.copy_gb_per_s) + " by one thread"),
        ("spill folder", place(folder)),
        ("direct I/O", direct(folder)),
        ("write", one_way(folder.write_gb_per_s, folder.write_4k_us)),
        ("read", one_way(folder.read_gb_per_s, folder.read_4k_us)),
        ("io_uring", io_uring(folder)),
        ("CUDA driver", cuda(&findings.cuda)),
    ];
    if let Some(wear) = &findings.wear {
        rows.push(("full use", full_use(wear)));
        rows.push(("SSD wear", worn(wear)));
    }
    align(&rows)
}

fn align(rows: &[(&str, String)]) -> String {
    let width = rows.iter().map(|(name, _)| name.len()).max().unwrap_or(0);
    let lines = rows.iter().map(|(name, found)| format!("{name:<width$}  {found}"));
    lines.collect::<Vec<_>>().join("\n") + "\n"
}

fn memory(memory: &Memory) -> String {
    let known = |bytes: Option<u64>| bytes.map_or("an unknown amount".to_owned(), size::format);
    let (has, free) = (known(memory.machine_bytes), known(memory.available_bytes));
    let may = if memory.is_limited() {
        format!("{} of it (a limit is set)", known(memory.may_use_bytes))
    } else {
        "all of it".to_owned()
    };
    format!("{has}, {free} available now; this process may use {may}")
}

fn speed(gb_per_s: f64) -> String {
    format!("{gb_per_s:.2} GB/s")
}

fn one_way(gb_per_s: f64, small_us: f64) -> String {
    format!("{}, 4 KiB in {small_us:.1} us", speed(gb_per_s))
}

fn place(folder: &Folder) -> String {
    let free = folder.free_bytes.map_or("unknown".to_owned(), size::format);
    format!("{} ({}), {free} free", folder.path, folder.file_system)
}

fn direct(folder: &Folder) -> String {
    match &folder.why_not_direct {
        None => "yes".to_owned(),
        // The reason is a sentence; it comes with the advice.
        Some(_) if folder.in_ram => "no: it is RAM".to_owned(),
        Some(_) => "no: the file system refuses it".to_owned(),
    }
}

fn io_uring(folder: &Folder) -> String {
    folder.why_not_io_uring.as_ref().map_or("yes".to_owned(), |why| format!("no: {why}"))
}

fn cuda(found: &Cuda) -> String {
    if found.is_absent() {
        return "none: no kernel driver, no device node, no libcuda.so.1 where the loader looks"
            .to_owned();
    }
    let driver = found
        .driver
        .as_deref()
        .map_or("no kernel driver".to_owned(), |version| format!("kernel driver {version}"));
    let devices = match found.devices {
        0 => "no device node".to_owned(),
        1 => "1 device".to_owned(),
        many => format!("{many} devices"),
    };
    let names = match &*found.names {
        [] => String::new(),
        names => format!(" ({})", names.join(", ")),
    };
    let library = found.library.as_deref().unwrap_or("no libcuda.so.1 where the loader looks");
    format!("{driver}, {devices}{names}, {library} (files, nothing was loaded)")
}

fn full_use(wear: &Wear) -> String {
    format!(
        "{:.0} TB written a day, {:.0} TB a year, if all day long bytes go out and come back",
        wear.written_tb_per_day, wear.written_tb_per_year
    )
}

fn worn(wear: &Wear) -> String {
    format!(
        "an SSD rated for {:.0} TB written would have had them after {} of that",
        wear.rated_tbw,
        days(wear.days_to_rating)
    )
}

fn days(days: f64) -> String {
    if days < 10. { format!("{days:.1} days") } else { format!("{days:.0} days") }
}
