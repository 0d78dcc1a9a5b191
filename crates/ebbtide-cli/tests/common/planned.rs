//! What the tests of `trace`, `plan` and `simulate` have in common.

use serde_json::Value;

use super::{Place, names, text};

/// Equal layers of four storages and an output.
pub(crate) const EQUAL: [&str; 6] = ["--synthetic", "6", "--storages", "4", "--seed", "5"];
/// The same with storages and layers that can't be recomputed.
pub(crate) const FIXED: [&str; 6] = ["--synthetic", "6", "--storages", "4", "--seed", "4"];

/// A folder with the trace `t` of such a model.
pub(crate) fn traced(model: &[&str]) -> Place {
    let place = Place::new();
    well(&place, &[&["trace"], model, &["-o", "t"]].concat());
    place
}

/// The same with the plan `p`.
pub(crate) fn planned(model: &[&str], memory: &str) -> Place {
    let place = traced(model);
    well(&place, &["plan", "t", "--memory", memory, "-o", "p"]);
    place
}

/// What a command prints that has to go well and to say nothing else.
pub(crate) fn well(place: &Place, args: &[&str]) -> String {
    let output = place.run(args);
    assert!(output.status.success(), "{args:?}: {}", text(&output.stderr));
    assert_eq!(text(&output.stderr), "", "{args:?}");
    text(&output.stdout)
}

/// What a command says that has to refuse, and to leave no trace of it.
pub(crate) fn refused(place: &Place, args: &[&str]) -> String {
    let before = names(place.path());
    let output = place.run(args);
    assert_eq!(output.status.code(), Some(2), "{args:?}: {}", text(&output.stderr));
    assert_eq!(text(&output.stdout), "", "standard output is for data");
    assert_eq!(names(place.path()), before, "something was written");
    let said = text(&output.stderr);
    assert!(said.starts_with("error: ") && said.contains("\nhint: "), "{said}");
    assert_eq!(said.lines().count(), 2, "{said}");
    said
}

/// Changes a file of the place as an editor would.
pub(crate) fn edit(place: &Place, name: &str, from: &str, to: &str) {
    let text = String::from_utf8(place.bytes(name)).unwrap();
    assert!(text.contains(from), "{from} is not in {text}");
    std::fs::write(place.path().join(name), text.replacen(from, to, 1)).unwrap();
}

/// Changes what the plan `name`, which keeps everything, does with a layer.
pub(crate) fn decide(place: &Place, name: &str, layer: usize, decided: &str) {
    let line = format!("{{\"name\":\"h.{layer}\",\"recompute\":false,\"swap\":[]}}");
    edit(place, name, &line, &format!("{{\"name\":\"h.{layer}\",{decided}}}"));
}

pub(crate) fn whole(value: &Value) -> u64 {
    value.as_u64().unwrap_or_else(|| panic!("{value} is no whole number"))
}
