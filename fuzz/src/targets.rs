//! The targets. Each panics where a promise of the parser is broken.

use ebbtide_core::{MemoryBudget, Policies, size};
use ebbtide_plan::{PlanFile, Solver, Trace, plan as search, predict, range, synthetic};

/// A target and what the runner has to know of it.
#[derive(Clone, Copy, Debug)]
pub struct Target {
    /// Its name, which is that of its folder of `corpus/`, too.
    pub name: &'static str,
    /// Runs it.
    pub run: fn(&[u8]),
    /// Whether inputs are safetensors files, whose first 8 bytes are a length: most changes to one
    /// that is left wrong would be answered before anything else is read.
    pub framed: bool,
}

/// All targets.
pub const ALL: [Target; 5] = [
    Target { name: "policy", run: policy, framed: false },
    Target { name: "size", run: size, framed: false },
    Target { name: "resume", run: resume, framed: true },
    Target { name: "trace", run: trace, framed: false },
    Target { name: "plan", run: plan, framed: false },
];

/// Most layers of a model that a policy is parsed for.
const LAYERS: usize = 64;
/// Bytes on the heap that a saved run may take at once, for each byte of the file: a copy of it, its
/// header as a tree, the model, and the restored tensors.
const HEAP_PER_BYTE: u64 = 64;
/// And whatever its length.
const HEAP: u64 = 1 << 20;
/// Layers and storages of the largest model that is planned for: time has to go to the files.
const PLANNED: (usize, usize) = (4, 24);

/// The text of `--policy`. The first byte is the number of layers.
///
/// # Panics
/// A policy that was read does not survive being written out.
pub fn policy(bytes: &[u8]) {
    let Some((&first, text)) = bytes.split_first() else { return };
    let layers = usize::from(first) % (LAYERS + 1);
    let text = String::from_utf8_lossy(text);
    let Ok(policies) = Policies::parse(&text, layers) else { return };
    assert_eq!(policies.len(), layers, "layers of {text:?}");
    if layers > 0 {
        let again = Policies::parse(&policies.to_string(), layers);
        assert_eq!(again.expect("a policy that was written out"), policies);
    }
}

/// The text of a size, or of a budget.
///
/// # Panics
/// A size that was read is not what its bytes are, or can't be written out; a budget is more than
/// all.
pub fn size(bytes: &[u8]) {
    let text = String::from_utf8_lossy(bytes);
    if let Ok(MemoryBudget::Percent(percent)) = MemoryBudget::parse(&text) {
        assert!((0.0..=100.0).contains(&percent), "{percent} of {text:?}");
    }
    let Ok(size) = size::parse(&text) else { return };
    assert_eq!(size::parse(&size.to_string()).ok(), Some(size), "bytes of {text:?}");
    let shown = size::format(size);
    assert!(size::parse(&shown).is_ok() || size > u64::MAX / 2, "{shown} of {text:?}");
}

/// A file for `--resume`.
///
/// # Panics
/// An accepted file can't be restored, or the heap grew out of proportion to the file.
pub fn resume(bytes: &[u8]) {
    let peak = ebbtide_cli::fuzz::heap_peak(|| {
        ebbtide_cli::fuzz::resume(bytes);
    });
    let most = HEAP + HEAP_PER_BYTE * bytes.len() as u64;
    assert!(peak <= most, "{peak} bytes on the heap for a file of {}", bytes.len());
}

/// A trace. A small one is planned for, too.
///
/// # Panics
/// An accepted trace does not survive being written out, or a plan for it breaks the budget.
pub fn trace(bytes: &[u8]) {
    let text = String::from_utf8_lossy(bytes);
    let Ok(trace) = Trace::parse(&text) else { return };
    let again = Trace::parse(&trace.to_json());
    assert_eq!(again.expect("a trace that was written out"), trace);
    let model = trace.model();
    let (layers, storages) = PLANNED;
    let small = model.layers.len() <= layers && model.storages() <= storages;
    // One in four: a search takes a hundred times as long as a file.
    if !small || !bytes.len().is_multiple_of(4) {
        return;
    }
    let range = range(&model);
    assert!(range.least <= range.most && range.most <= range.plain, "{range:?}");
    for part in [0.0, 0.3] {
        let budget = range.at(part);
        let planned = search(&model, budget, Solver::Fast).expect("a budget that was found");
        assert!(planned.prediction.peak_bytes <= budget, "{} of {budget}", planned.budget);
    }
}

/// A plan for one model.
///
/// # Panics
/// An accepted plan does not survive being written out, or breaks its budget.
pub fn plan(bytes: &[u8]) {
    let text = String::from_utf8_lossy(bytes);
    let Ok(file) = PlanFile::parse(&text) else { return };
    let again = PlanFile::parse(&file.to_json());
    assert_eq!(again.expect("a plan that was written out"), file);
    assert!(ebbtide_plan::diff(&file, &file).is_empty(), "it differs from itself");
    let model = synthetic::trace(4, 3, 4).expect("a model of four layers").model();
    let Ok(plan) = file.plan(&model) else { return };
    if let Ok(prediction) = predict(&model, &plan, file.memory_bytes()) {
        assert!(prediction.peak_bytes <= file.memory_bytes(), "over the budget");
    }
}
