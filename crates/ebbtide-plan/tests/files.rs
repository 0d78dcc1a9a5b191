//! Traces and plans as files: what is written, what is read back, what is refused and why.

use ebbtide_plan::trace::{
    LayerRecord, LinkRecord, StorageRecord, TierRecord, TraceBuilder, TraceError,
};
use ebbtide_plan::{
    FileError, PlanError, PlanFile, Solver, Trace, diff, plan, predict, range, synthetic,
};

fn small() -> Trace {
    let mut builder = TraceBuilder::new("a test");
    let link = LinkRecord { bytes_per_s: 1_000_000_000, bytes_per_s_busy: 0, latency_ns: 8000 };
    builder.created(1_800_000_000).static_bytes(4096).step_fixed_ns(10).tier(TierRecord {
        name: "host".into(),
        capacity_bytes: 1 << 30,
        out: link,
        back: LinkRecord { bytes_per_s_busy: 900_000_000, ..link },
        compute_slowdown_permille: 1020,
        shared_duplex: false,
    });
    for at in 0..3u64 {
        let mut storages = vec![StorageRecord::inner("q", 1 << 20)];
        if at < 2 {
            storages.push(StorageRecord::output("out", 1 << 18, true));
        }
        builder.layer(LayerRecord {
            name: format!("h.{at}"),
            forward_ns: 1_000_000 + at,
            backward_ns: 2_000_000,
            recompute_ns: 1_000_000,
            backward_temp_bytes: 512,
            why_not: (at == 2).then(|| "it draws random numbers".into()),
            storages,
            ..LayerRecord::default()
        });
    }
    builder.build().unwrap()
}

#[test]
fn a_trace_is_a_line_for_each_tier_storage_and_layer() {
    insta::assert_snapshot!(small().to_json(), @r#"
    {"format":"ebbtide.trace","version":1,
     "source":"a test",
     "created_unix_s":1800000000,
     "static_bytes":4096,
     "step_fixed_ns":10,
     "tiers":[
      {"name":"host","capacity_bytes":1073741824,"out":{"bytes_per_s":1000000000,"bytes_per_s_busy":0,"latency_ns":8000},"in":{"bytes_per_s":1000000000,"bytes_per_s_busy":900000000,"latency_ns":8000},"compute_slowdown_permille":1020,"shared_duplex":false}
     ],
     "shapes":[
      {"id":"shape.0","forward_ns":1000000,"backward_ns":2000000,"recompute_ns":1000000,"forward_temp_bytes":0,"backward_temp_bytes":512,"recompute_temp_bytes":0,"recomputable":true,"why_not":null,"storages":[
       {"name":"q","bytes":1048576,"last_forward":0,"backward_first":0,"backward_last":0,"read_by":[],"recomputable":true},
       {"name":"out","bytes":262144,"last_forward":1,"backward_first":1,"backward_last":1,"read_by":[1],"recomputable":false}]},
      {"id":"shape.1","forward_ns":1000002,"backward_ns":2000000,"recompute_ns":1000000,"forward_temp_bytes":0,"backward_temp_bytes":512,"recompute_temp_bytes":0,"recomputable":false,"why_not":"it draws random numbers","storages":[
       {"name":"q","bytes":1048576,"last_forward":0,"backward_first":0,"backward_last":0,"read_by":[],"recomputable":true}]}
     ],
     "layers":[
      {"shape":"shape.0","name":"h.0"},
      {"shape":"shape.0","name":"h.1","forward_ns":1000001},
      {"shape":"shape.1","name":"h.2"}
     ]}
    "#);
}

#[test]
fn a_plan_is_a_line_for_each_layer() {
    let trace = small();
    let model = trace.model();
    let planned = plan(&model, range(&model).at(0.3), Solver::Exact).unwrap();
    let file = PlanFile::new(&model, trace.sha256(), &planned);
    insta::assert_snapshot!(file.to_json(), @r#"
    {"format":"ebbtide.plan","version":1,
     "trace_sha256":"dd85b6ebe81b31b76a32001763ab21d8a38a6cb6a83e76bcaa9628dd321d8086",
     "memory_bytes":2206259,
     "predicted":{"peak_bytes":1577472,"peak_at":{"op":"B","layer":2},"step_ns":11000013,"wait_load_ns":0,"wait_memory_ns":0},
     "layers":[
      {"name":"h.0","recompute":true,"swap":[]},
      {"name":"h.1","recompute":true,"swap":[]},
      {"name":"h.2","recompute":false,"swap":[]}
     ]}
    "#);
}

#[test]
fn files_come_back_as_they_were() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("trace.json");
    for seed in 0..10 {
        let trace = synthetic::trace(9, 7, seed).unwrap();
        trace.write(&path).unwrap();
        let again = Trace::read(&path).unwrap();
        assert_eq!(again, trace);
        assert_eq!(again.sha256(), trace.sha256());
        // As laid out by something else, it is the same trace.
        let value: serde_json::Value = serde_json::from_str(&trace.to_json()).unwrap();
        let pretty = serde_json::to_string_pretty(&value).unwrap();
        assert_eq!(Trace::parse(&pretty).unwrap().sha256(), trace.sha256());
    }
}

fn change(text: &str, from: &str, to: &str) -> String {
    assert!(text.contains(from), "{from} is not in {text}");
    text.replacen(from, to, 1)
}

/// What is changed in a good trace, and what is said of it.
#[test]
fn c17_a_trace_that_makes_no_sense_is_refused_with_the_place() {
    let text = small().to_json();
    let cases = [
        ("\"version\":1", "\"version\":2", "version 2 of ebbtide.trace is not known"),
        ("ebbtide.trace", "ebbtide.plan", "a file of format `ebbtide.plan`, not ebbtide.trace"),
        ("\"bytes_per_s\":1000000000", "\"bytes_per_s\":0", "trace, tier `host`: bytes_per_s is 0"),
        (
            "\"compute_slowdown_permille\":1020",
            "\"compute_slowdown_permille\":900",
            "trace, tier `host`: compute_slowdown_permille is 900, and 1000 is no slowdown",
        ),
        (
            "\"last_forward\":1",
            "\"last_forward\":3",
            "trace, layer 0 `h.0`, storage `out`: last_forward is 3 layers behind, and there are 2",
        ),
        (
            "\"read_by\":[1]",
            "\"read_by\":[2]",
            "trace, shape `shape.0`, storage `out`: read_by is larger than last_forward",
        ),
        (
            "\"read_by\":[1]",
            "\"read_by\":[0]",
            "trace, shape `shape.0`, storage `out`: read_by has a 0, the layer that makes it",
        ),
        (
            "\"backward_last\":0",
            "\"backward_last\":1",
            "trace, shape `shape.0`, storage `q`: backward_last is larger than backward_first",
        ),
        (
            "\"backward_last\":0",
            "\"backward_last\":null",
            "trace, shape `shape.0`, storage `q`: backward_first and backward_last are not both \
             there or both null",
        ),
        (
            "\"name\":\"h.1\"",
            "\"name\":\"h.0\"",
            "trace, layers: the name `h.0` is used twice, empty or too long",
        ),
        ("\"shape\":\"shape.1\"", "\"shape\":\"x\"", "trace, layer 2 `h.2`: there is no shape `x`"),
        (
            "\"bytes\":1048576",
            "\"bytes\":1000000000000000000",
            "trace, layer 1 `h.1`: all bytes or all times together are more than 2^60",
        ),
        (
            "\"why_not\":\"it draws random numbers\"",
            "\"why_not\":null",
            "trace, layer 2 `h.2`: recomputable is false and why_not does not say why",
        ),
    ];
    for (from, to, message) in cases {
        let error = Trace::parse(&change(&text, from, to)).unwrap_err();
        assert_eq!(error.to_string(), message);
        assert!(!error.hint().is_empty());
    }
}

#[test]
fn c17_a_trace_with_other_keys_is_refused() {
    let text = small().to_json();
    for (from, to, part) in [
        ("\"static_bytes\":4096", "\"static_bytes\":-1", "invalid value: integer `-1`"),
        ("\"static_bytes\":4096", "\"static_bytes\":4096,\"x\":1", "unknown field `x`"),
        ("\"latency_ns\":8000", "\"latency\":8000", "unknown field `latency`"),
        ("\"static_bytes\":4096,", "", "missing field `static_bytes`"),
    ] {
        let error = Trace::parse(&change(&text, from, to)).unwrap_err();
        assert!(matches!(error, TraceError::File(FileError::Json { .. })));
        assert!(error.to_string().contains(part), "{error}");
    }
    let key = "\"static_bytes\":4096,\"plain_peak_bytes\":";
    let known = change(&text, "\"static_bytes\":4096,", &format!("{key}70000000,"));
    let known = Trace::parse(&known).unwrap();
    assert_eq!(ebbtide_plan::range(&known.model()).plain, 70_000_000);
    assert_eq!(Trace::parse(&known.to_json()).unwrap(), known);
    let much = change(&text, "\"static_bytes\":4096,", &format!("{key}9000000000000000000,"));
    let error = Trace::parse(&much).unwrap_err();
    assert!(error.to_string().contains("plain_peak_bytes"), "{error}");
    let none = Trace::parse("{\"format\":\"ebbtide.trace\",\"version\":1}").unwrap_err();
    assert!(none.to_string().contains("missing field"), "{none}");
    assert!(TraceBuilder::new("nothing").build().is_err());
}

/// A small file does not become a model that fills the memory.
#[test]
fn a_small_file_is_a_small_model() {
    let storage = |at: usize| StorageRecord::inner(format!("{at}"), 1);
    let mut builder = TraceBuilder::new("a test");
    for at in 0..2000 {
        let storages = (0..1000).map(storage).collect();
        builder.layer(LayerRecord { name: format!("{at}"), storages, ..LayerRecord::default() });
    }
    let error = builder.build().unwrap_err();
    assert_eq!(error.to_string(), "trace, storages: there are more than 1048576");
}

#[test]
fn a_file_that_is_too_long_or_not_there_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("long");
    let file = std::fs::File::create(&path).unwrap();
    file.set_len((64 << 20) + 1).unwrap();
    let error = Trace::read(&path).unwrap_err();
    assert!(error.to_string().ends_with("has more than 64 MiB"), "{error}");
    let error = PlanFile::read(&folder.path().join("none")).unwrap_err();
    assert!(matches!(error, PlanError::File(FileError::Io { .. })));
}

fn file_of(trace: &Trace, part: f64) -> PlanFile {
    let model = trace.model();
    let planned = plan(&model, range(&model).at(part), Solver::Fast).unwrap();
    PlanFile::new(&model, trace.sha256(), &planned)
}

#[test]
fn a_plan_survives_a_file() {
    for seed in 0..15 {
        let trace = synthetic::trace(6 + seed % 5, 3, seed as u64).unwrap();
        let model = trace.model();
        let planned = plan(&model, range(&model).at(0.2), Solver::Fast).unwrap();
        let file = PlanFile::new(&model, trace.sha256(), &planned);
        let plan = PlanFile::parse(&file.to_json()).unwrap().plan(&model).unwrap();
        assert_eq!(plan, planned.plan);
        let again = predict(&model, &plan, file.memory_bytes()).unwrap();
        assert_eq!(again, planned.prediction);
        assert_eq!(again.peak_bytes, file.predicted().peak_bytes);
    }
}

/// A plan of another model, or one with a slip of the pen, is refused with the reason.
#[test]
fn c17_a_plan_that_does_not_fit_the_model_says_why() {
    let trace = small();
    let model = trace.model();
    let line = |at: usize, rest: &str| format!("{{\"name\":\"h.{at}\"{rest}}}");
    let file = |lines: &[String]| {
        let text = file_of(&trace, 1.0).to_json();
        let head = text.split("\"layers\"").next().unwrap();
        PlanFile::parse(&format!("{head}\"layers\":[{}]}}", lines.join(","))).unwrap()
    };
    let with = |at: usize, rest: &str| {
        let mut lines: Vec<String> = (0..3).map(|at| line(at, "")).collect();
        lines[at] = line(at, rest);
        file(&lines).plan(&model).unwrap_err().to_string()
    };
    let prefix = "the plan does not fit the model: ";
    let two = file(&[line(0, ""), line(1, "")]).plan(&model).unwrap_err();
    assert_eq!(two.to_string(), format!("{prefix}2 layers, the model has 3"));
    let other = file(&[line(0, ""), line(7, ""), line(2, "")]).plan(&model).unwrap_err();
    assert_eq!(other.to_string(), format!("{prefix}layer 1 is `h.7`, in the model it is `h.1`"));
    let cases = [
        (0, ",\"swap\":[\"k\"]", "layer `h.0` has no storage `k`"),
        (0, ",\"swap\":[\"q\",\"q\"]", "layer `h.0` names storage `q` twice"),
        (
            0,
            ",\"swap\":[\"q\"],\"tier\":\"disk\"",
            "layer `h.0` goes to tier `disk`; tiers there are: host",
        ),
        (2, ",\"recompute\":true", "layer `h.2` can't be recomputed: it draws random numbers"),
        (
            1,
            ",\"recompute\":true,\"swap\":[\"q\"]",
            "layer `h.1`: `q` has no effect, it is recomputed",
        ),
        (1, ",\"tier\":\"host\"", "layer `h.1`: `tier` has no effect, nothing is swapped"),
        (
            1,
            ",\"swap\":[\"q\"],\"load_at\":{\"op\":\"B\",\"layer\":3}",
            "layer `h.1` loads at layer 3, there are 3 from 0",
        ),
    ];
    for (at, rest, message) in cases {
        assert_eq!(with(at, rest), format!("{prefix}{message}"));
    }
}

#[test]
fn a_difference_is_a_line() {
    let trace = synthetic::trace(6, 2, 3).unwrap();
    let (a, b) = (file_of(&trace, 0.1), file_of(&trace, 0.6));
    assert_eq!(diff(&a, &a), Vec::<String>::new());
    insta::assert_snapshot!(diff(&a, &b).join("\n"), @r#"
    memory: 75.6 MiB -> 133.6 MiB
    predicted peak: 70.0 MiB -> 128.7 MiB
    predicted step: 92.000 ms -> 76.000 ms
    layer 0 `h.0`: recompute -> swap s.1 to host until R4
    layer 1 `h.1`: recompute -> swap s.1 to host until R4
    layer 3 `h.3`: recompute -> keep
    layer 4 `h.4`: recompute -> keep
    "#);
}

proptest::proptest! {
    /// Whatever is in a file, it is read or refused.
    #[test]
    fn any_change_of_a_file_is_read_or_refused(
        at in 0..2000usize, byte in proptest::num::u8::ANY, seed in 0..5u64,
    ) {
        let trace = synthetic::trace(3, 2, seed).unwrap();
        let mut bytes = trace.to_json().into_bytes();
        let len = bytes.len();
        bytes[at % len] = byte;
        if let Ok(text) = String::from_utf8(bytes) {
            if let Ok(changed) = Trace::parse(&text) {
                let model = changed.model();
                let _ = plan(&model, range(&model).at(0.5), Solver::Fast);
            }
            let _ = PlanFile::parse(&text);
        }
    }
}
