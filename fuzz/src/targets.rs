//! The targets. Each panics where a promise of the parser is broken.

use ebbtide_core::{Policies, size};

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
pub const ALL: [Target; 3] = [
    Target { name: "policy", run: policy, framed: false },
    Target { name: "size", run: size, framed: false },
    Target { name: "resume", run: resume, framed: true },
];

/// Most layers of a model that a policy is parsed for.
const LAYERS: usize = 64;
/// Bytes on the heap that a saved run may take at once, for each byte of the file: a copy of it, its
/// header as a tree, the model, and the restored tensors.
const HEAP_PER_BYTE: u64 = 64;
/// And whatever its length.
const HEAP: u64 = 1 << 20;

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

/// The text of a size.
///
/// # Panics
/// A size that was read is not what its bytes are, or can't be written out.
pub fn size(bytes: &[u8]) {
    let text = String::from_utf8_lossy(bytes);
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
