//! Everything that was found, and the file that `--json` writes of it.

use std::path::Path;

use serde::Serialize;

use super::cuda::Cuda;
use super::folder::Folder;
use super::memory::Memory;
use super::wear::Wear;
use crate::failure::Failure;

/// Version of the layout of the file; it changes when a field changes its meaning or goes.
const SCHEMA: u32 = 1;

/// What was found.
#[derive(Debug, Serialize)]
pub(super) struct Findings {
    /// Whether the measurements were short ones.
    quick: bool,
    pub(super) memory: Memory,
    pub(super) folder: Folder,
    pub(super) cuda: Cuda,
    /// Null where the folder is RAM, which does not wear.
    pub(super) wear: Option<Wear>,
}

/// The file.
#[derive(Debug, Serialize)]
pub(super) struct Report<'a> {
    schema: u32,
    command: &'static str,
    #[serde(flatten)]
    findings: &'a Findings,
    advice: &'a [String],
}

impl Findings {
    /// Looks at everything and measures what can be measured.
    pub(super) fn gather(dir: &Path, quick: bool) -> Result<Self, Failure> {
        let folder = Folder::measure(dir, quick)?;
        let search = std::env::var_os("LD_LIBRARY_PATH");
        let wear = (!folder.in_ram).then(|| Wear::at(&folder));
        Ok(Self {
            quick,
            memory: Memory::measure()?,
            folder,
            cuda: Cuda::look(Path::new("/"), search.as_deref()),
            wear,
        })
    }

    pub(super) fn report<'a>(&'a self, advice: &'a [String]) -> Report<'a> {
        Report { schema: SCHEMA, command: "doctor", findings: self, advice }
    }
}
