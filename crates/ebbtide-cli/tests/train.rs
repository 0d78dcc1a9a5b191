//! What a run prints and writes.

mod common;

use common::{Place, TINY, keys, names, numbers, text};

#[test]
fn the_json_has_every_field_and_no_other() {
    let place = Place::new();
    place.trained(&["--steps", "4", "--quiet", "--json", "report.json"]);
    let report = place.json("report.json");
    assert_eq!(
        keys(&report),
        ["command", "device", "identical", "model", "overlap", "plan", "runs", "schema"]
    );
    assert_eq!(report["schema"], 1);
    assert_eq!(report["command"], "train");
    assert_eq!(report["device"], "cpu");
    assert!(report["identical"].is_null(), "nothing was compared");
    let model = serde_json::json!({
        "layers": 2, "d_model": 16, "heads": 2, "seq": 16, "batch": 2, "vocab": 256,
        "parameters": 10_656, "dtype": "f32",
    });
    assert_eq!(report["model"], model);
    let fields = "base_bytes dropped_bytes gradients_bytes gradients_tensors gradients_xxh3 loss \
        missed_prefetches mode moved_in_bytes moved_out_bytes peak_bytes peak_rss_bytes probe_ms \
        recompute_ms step_ms step_peak_bytes steps tier wait_ms";
    for run in report["runs"].as_array().unwrap() {
        assert_eq!(keys(run).join(" "), fields);
        let steps = usize::try_from(run["steps"].as_u64().unwrap()).unwrap();
        assert_eq!(numbers(&run["loss"]).len(), steps);
        assert_eq!(numbers(&run["step_ms"]).len(), steps);
        assert_eq!(run["gradients_xxh3"].as_str().unwrap().len(), 16);
        assert_eq!(run["gradients_tensors"], 24);
        assert_eq!(run["gradients_bytes"], 4 * 10_656);
        assert!(run["peak_bytes"].as_u64() > run["base_bytes"].as_u64());
        assert!(run["peak_rss_bytes"].as_u64() > Some(1 << 20));
    }
    assert_eq!(names(place.path()), ["report.json"], "temporary files were left");
}

/// Without --compare: three plain steps first, then the chosen mode.
#[test]
fn a_single_mode_is_measured_against_three_plain_steps() {
    let place = Place::new();
    let output = place.trained(&["--steps", "5", "--json", "report.json"]);
    let report = place.json("report.json");
    let runs = report["runs"].as_array().unwrap();
    let modes: Vec<_> = runs.iter().map(|r| (&r["mode"], &r["tier"], &r["steps"])).collect();
    let expected = serde_json::json!([["plain", null, 3], ["auto", "file", 5]]);
    assert_eq!(serde_json::json!(modes), expected);
    assert_eq!(numbers(&runs[0]["loss"])[..], numbers(&runs[1]["loss"])[..3]);
    assert_eq!(runs[0]["moved_out_bytes"], 0);

    let said = text(&output.stdout);
    let last = said.lines().last().unwrap();
    assert_eq!(last, "losses and gradients of the first 3 steps: bit-identical to plain");
    assert_eq!(said.lines().count(), 4, "head, two rows, one sentence:\n{said}");
}

#[test]
fn plain_runs_alone() {
    let place = Place::new();
    let output = place.trained(&["--steps", "3", "--policy", "plain", "--json", "r", "--quiet"]);
    assert_eq!(place.json("r")["runs"].as_array().unwrap().len(), 1);
    assert_eq!(text(&output.stdout).lines().count(), 2);
}

#[test]
fn policies_by_layer_and_the_host_tier_run_and_give_the_same() {
    let place = Place::new();
    let runs: [&[&str]; 5] = [
        &["--policy", "plain"],
        &["--policy", "0-0:recompute,1:swap"],
        &["--policy", "swap", "--tier", "host", "--prefetch", "0"],
        &["--policy", "swap", "--spill-dir", ".", "--host-bytes", "64MiB", "--prefetch", "2"],
        &["--tier", "host"],
    ];
    let mut hashes = Vec::new();
    for run in runs {
        place.trained(&[&["--steps", "3", "--json", "r"], run].concat());
        let report = place.json("r");
        let last = report["runs"].as_array().unwrap().last().unwrap().clone();
        hashes.push((last["gradients_xxh3"].clone(), last["loss"].clone()));
    }
    assert!(hashes.iter().all(|hash| *hash == hashes[0]), "{hashes:?}");
}

#[test]
fn both_types_learn() {
    for dtype in ["f32", "bf16"] {
        let place = Place::new();
        let args = ["--steps", "40", "--lr", "1e-2", "--dtype", dtype, "--json", "r"];
        place.trained(&args);
        let report = place.json("r");
        assert_eq!(report["model"]["dtype"], dtype);
        let loss = numbers(&report["runs"][1]["loss"]);
        assert!(loss[39] < loss[0] - 1., "{dtype}: {loss:?}");
    }
}

/// A budget: never over it, the first step included; the plan is told, and the figures agree.
#[test]
fn a_budget_holds_from_the_first_step_on() {
    let place = Place::new();
    let model = ["train", "--layers", "4", "--d-model", "32", "--heads", "2", "--seq", "64"];
    for memory in ["90%", "100%"] {
        let args = [&model[..], &["--steps", "5", "--memory", memory, "--json", "r"]].concat();
        let output = place.run(&args);
        let said = text(&output.stderr);
        assert!(output.status.success(), "{said}");
        assert!(said.contains("note: the plan for "), "{said}");
        let report = place.json("r");
        let (plan, run) = (&report["plan"], &report["runs"][1]);
        assert_eq!(run["mode"], "auto");
        assert!(run["peak_bytes"].as_u64() <= plan["memory_bytes"].as_u64(), "{report}");
        assert!(plan["predicted_peak_bytes"].as_u64() <= plan["memory_bytes"].as_u64());
        assert!(plan["predicted_step_ms"].as_f64() > Some(0.));
        assert_eq!(plan["layers"].as_array().unwrap().len(), 4);
        assert_eq!(keys(&report["overlap"]), ["in", "out"]);
        assert_eq!(keys(&report["overlap"]["in"]), ["exposed_ms", "hidden_ms"]);
    }
}

/// What can't be met is said with what could be, and nothing is written.
#[test]
fn a_budget_that_nothing_meets_writes_nothing() {
    let place = Place::new();
    let output = place.train(&["--steps", "3", "--memory", "64KiB", "--json", "r", "--save", "s"]);
    assert_eq!(output.status.code(), Some(2));
    let said = text(&output.stderr);
    let lines: Vec<_> = said.lines().rev().take(2).collect();
    assert!(lines[1].starts_with("error: auto: no plan fits 64.0 KiB: the least found is "));
    assert!(lines[0].starts_with("hint: give at least "), "{said}");
    assert_eq!(names(place.path()), [""; 0], "something was written");
}

/// Standard error is not a terminal here: lines instead of a bar, none at all with --quiet.
#[test]
fn bars_and_chatter_stay_where_they_belong() {
    let place = Place::new();
    let said = text(&place.trained(&["--steps", "20"]).stderr);
    assert!(!said.contains('\r') && !said.contains('\u{1b}'), "{said:?}");
    let lines = said.lines().filter(|line| line.starts_with("auto, step ")).count();
    assert_eq!(lines, 10, "a line for each tenth of the steps:\n{said}");

    let output = place.trained(&["--steps", "20", "--quiet"]);
    assert_eq!(text(&output.stderr), "");
    assert!(text(&output.stdout).starts_with("mode "), "the table is data");
}

#[test]
fn a_sample_follows_the_table_and_disturbs_nothing() {
    let place = Place::new();
    let sampled = |name| {
        let args = ["--steps", "3", "--quiet", "--sample", "33", "--save", name];
        let output = place.trained(&args).stdout;
        let table = b"bit-identical to plain\n";
        let end = output.windows(table.len()).position(|w| w == table).unwrap() + table.len();
        output[end..].to_vec()
    };
    let bytes = sampled("a");
    assert_eq!(bytes.len(), 33);
    assert_eq!(bytes, sampled("b"));
    place.trained(&["--steps", "3", "--quiet", "--save", "c"]);
    assert_eq!(place.bytes("a"), place.bytes("c"));
}

#[test]
fn the_host_tier_says_that_it_saves_nothing() {
    let place = Place::new();
    let said = text(&place.trained(&["--steps", "1", "--tier", "host"]).stderr);
    assert!(said.contains("note: --tier host saves nothing on a CPU"), "{said}");
}

#[test]
fn a_timeline_is_json() {
    let place = Place::new();
    // Loads on demand, so that there are waits.
    place.trained(&["--steps", "3", "--timeline", "t.json", "--policy", "swap", "--prefetch", "0"]);
    let timeline = place.json("t.json");
    let events = timeline.as_array().unwrap();
    let of = |phase: &str| {
        let phase = phase.to_owned();
        events.iter().filter(move |e| e["ph"] == phase.as_str()).collect::<Vec<_>>()
    };
    let rows: Vec<&str> = of("M").iter().filter_map(|e| e["args"]["name"].as_str()).collect();
    for row in ["compute", "offload 0", "load 0"] {
        assert!(rows.contains(&row), "{row} is not among {rows:?}");
    }
    let names: Vec<&str> = of("X").iter().filter_map(|e| e["name"].as_str()).collect();
    for name in ["h.0 forward", "h.0 backward", "h.0 probe"] {
        assert!(names.contains(&name), "{name} is not among {names:?}");
    }
    assert!(!of("C").is_empty(), "no curve of device bytes");
    // Both ends of an arrow lie inside a span of their row.
    for end in of("s").into_iter().chain(of("f")) {
        let time = end["ts"].as_f64().unwrap();
        let inside = of("X").into_iter().any(|span| {
            let start = span["ts"].as_f64().unwrap();
            span["tid"] == end["tid"]
                && start <= time
                && time <= start + span["dur"].as_f64().unwrap()
        });
        assert!(inside, "{end}");
    }
    assert_eq!(of("s").len(), of("f").len());
}

/// `/dev/stdout` is written to, not replaced.
#[test]
fn the_json_may_go_to_standard_output() {
    let place = Place::new();
    let args = ["--steps", "1", "--policy", "plain", "--json", "/dev/stdout"];
    let said = text(&place.trained(&args).stdout);
    let (json, table) = said.split_once("\n}\n").unwrap();
    serde_json::from_str::<serde_json::Value>(&format!("{json}\n}}")).unwrap();
    assert!(table.starts_with("mode "), "{table}");
}

/// Nor is a file that standard output goes to, under whatever name.
#[test]
fn the_json_may_go_where_standard_output_goes() {
    let place = Place::new();
    for (number, name) in ["/dev/fd/1", "/proc/self/fd/1", "out2"].into_iter().enumerate() {
        let out = format!("out{number}");
        let file = std::fs::File::create(place.path().join(&out)).unwrap();
        let args = ["train", "--steps", "1", "--policy", "plain", "--json", name];
        let status = place.command(&[&args[..], &TINY].concat()).stdout(file).status().unwrap();
        assert!(status.success());
        let said = text(&place.bytes(&out));
        let (json, table) = said.split_once("\n}\n").unwrap();
        serde_json::from_str::<serde_json::Value>(&format!("{json}\n}}")).unwrap();
        assert!(table.starts_with("mode "), "{name}: {table}");
    }
}

#[test]
fn the_json_may_go_where_standard_error_goes() {
    let place = Place::new();
    let file = std::fs::File::create(place.path().join("err")).unwrap();
    let args = ["train", "--steps", "1", "--policy", "plain", "--json", "/dev/fd/2"];
    let status = place.command(&[&args[..], &TINY].concat()).stderr(file).status().unwrap();
    assert!(status.success());
    let said = text(&place.bytes("err"));
    let (chatter, json) = said.split_once("\n{\n").unwrap();
    assert!(chatter.contains("plain, step 1: "), "{chatter}");
    serde_json::from_str::<serde_json::Value>(&format!("{{{json}")).unwrap();
}

#[test]
fn help_and_version_are_data() {
    let place = Place::new();
    let help = place.run(&["train", "--help"]);
    assert!(help.status.success() && help.stderr.is_empty());
    let help = text(&help.stdout);
    for default in ["12", "256", "8", "4", "40", "1", "3e-4", "f32", "40%", "file"] {
        assert!(help.contains(&format!("[default: {default}]")), "{default}:\n{help}");
    }
    assert!(!text(&place.run(&["--help"]).stdout).contains("worker"));
    let version = text(&place.run(&["--version"]).stdout);
    assert_eq!(version, format!("ebbtide {}\n", env!("CARGO_PKG_VERSION")));
}
