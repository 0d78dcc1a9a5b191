//! The text a run trains on when none is named: ebbtide's own documents, so that a fresh clone
//! trains without any download.

/// In the order in which they are joined.
pub(crate) const DOCUMENTS: [&str; 4] = [
    include_str!("../../../README.md"),
    include_str!("../../../ARCHITECTURE.md"),
    include_str!("../../../TESTING.md"),
    include_str!("../../../CHANGELOG.md"),
];
