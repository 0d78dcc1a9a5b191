//! Whether there is a CUDA driver.
//!
//! Nothing is loaded or linked: files are looked at, in the places where the driver puts them and
//! where the loader would look for its library.

use std::ffi::OsStr;
use std::fs::{self, File};
use std::io::Read;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use serde::Serialize;

const LIBRARY: &str = "libcuda.so.1";

/// The loader's own folders, after what `LD_LIBRARY_PATH` and its cache name. The last one is where
/// WSL puts the driver of the host.
const FOLDERS: [&str; 7] = [
    "lib64",
    "usr/lib64",
    "lib",
    "usr/lib",
    "usr/lib/x86_64-linux-gnu",
    "usr/lib/aarch64-linux-gnu",
    "usr/lib/wsl/lib",
];

/// What of a driver is there.
#[derive(Debug, Default, PartialEq, Eq, Serialize)]
pub(super) struct Cuda {
    /// Version of the kernel's part.
    pub(super) driver: Option<String>,
    /// Where the loader would find the library.
    pub(super) library: Option<String>,
    /// Nodes `/dev/nvidia0`, `/dev/nvidia1`, ..
    pub(super) devices: usize,
    /// Names of the cards, as the driver tells them.
    pub(super) names: Vec<String>,
}

impl Cuda {
    /// Looks below `root`; `search` is what `LD_LIBRARY_PATH` holds.
    pub(super) fn look(root: &Path, search: Option<&OsStr>) -> Self {
        let version = fs::read_to_string(root.join("proc/driver/nvidia/version"));
        Self {
            driver: version.ok().as_deref().and_then(version_in),
            library: library(root, search).map(|path| path.display().to_string()),
            devices: devices(root),
            names: names(root),
        }
    }

    /// Whether a program could use a device, as far as files tell.
    pub(super) fn is_usable(&self) -> bool {
        self.library.is_some() && self.devices > 0
    }

    pub(super) fn is_absent(&self) -> bool {
        *self == Self::default()
    }
}

/// The version in `NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue ..`: the first
/// word of numbers and points.
fn version_in(text: &str) -> Option<String> {
    let number = |word: &&str| {
        word.contains('.') && word.bytes().all(|byte| byte.is_ascii_digit() || byte == b'.')
    };
    text.lines().next()?.split_whitespace().find(number).map(str::to_owned)
}

fn devices(root: &Path) -> usize {
    let entries = fs::read_dir(root.join("dev")).into_iter().flatten().flatten();
    let numbered = entries.filter(|entry| {
        let name = entry.file_name();
        let digits = name.as_bytes().strip_prefix(b"nvidia").unwrap_or_default();
        !digits.is_empty() && digits.iter().all(u8::is_ascii_digit)
    });
    numbered.count()
}

fn names(root: &Path) -> Vec<String> {
    let cards = fs::read_dir(root.join("proc/driver/nvidia/gpus")).into_iter().flatten().flatten();
    let name = |information: String| {
        let model = information.lines().find_map(|line| line.strip_prefix("Model:"))?;
        Some(model.trim().to_owned())
    };
    let mut names: Vec<_> = cards
        .filter_map(|card| name(fs::read_to_string(card.path().join("information")).ok()?))
        .collect();
    names.sort();
    names
}

/// In the loader's order: the variable, the cache, its own folders.
fn library(root: &Path, search: Option<&OsStr>) -> Option<PathBuf> {
    let named =
        search.into_iter().flat_map(std::env::split_paths).map(|folder| folder.join(LIBRARY));
    let cached = fs::read(root.join("etc/ld.so.cache")).map(|cache| cached(&cache));
    let cached = cached.into_iter().flatten().map(|path| root.join(path.trim_start_matches('/')));
    let usual = FOLDERS.iter().map(|folder| root.join(folder).join(LIBRARY));
    named.chain(cached).chain(usual).find(|path| is_native(path))
}

/// Paths of the library in the loader's cache, whose texts end with a zero each.
fn cached(cache: &[u8]) -> Vec<String> {
    let texts = cache.split(|&byte| byte == 0).filter_map(|text| std::str::from_utf8(text).ok());
    texts
        .filter(|text| text.starts_with('/') && text.ends_with(LIBRARY))
        .map(str::to_owned)
        .collect()
}

/// Whether it is a library of this machine's width: both may be installed.
fn is_native(path: &Path) -> bool {
    let mut start = [0; 5];
    let read = File::open(path).and_then(|mut file| file.read_exact(&mut start));
    let width = if cfg!(target_pointer_width = "64") { 2 } else { 1 };
    read.is_ok() && start == [0x7f, b'E', b'L', b'F', width]
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A machine with these files.
    fn machine(files: &[(&str, &[u8])]) -> tempfile::TempDir {
        let root = tempfile::tempdir().unwrap();
        for (path, content) in files {
            let path = root.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, content).unwrap();
        }
        root
    }

    fn shown(root: &tempfile::TempDir, path: &str) -> String {
        root.path().join(path).display().to_string()
    }

    const OLD: &[u8] = b"NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue Mar 5\nGCC";
    const OPEN: &str =
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.86.10  Release Build  (x)\n";

    #[test]
    fn a_machine_with_a_driver() {
        let root = machine(&[
            ("proc/driver/nvidia/version", OLD),
            (
                "proc/driver/nvidia/gpus/0000:01:00.0/information",
                b"Model: \t\t NVIDIA X1\nIRQ: 5\n",
            ),
            ("dev/nvidia0", b""),
            ("dev/nvidia1", b""),
            ("dev/nvidiactl", b""),
            ("dev/nvidia-uvm", b""),
            ("usr/lib/libcuda.so.1", b"\x7fELF\x01, of the other width"),
            ("opt/driver/libcuda.so.1", b"\x7fELF\x02"),
            ("etc/ld.so.cache", b"glibc-ld.so.cache1.1\0libcuda.so.1\0/opt/driver/libcuda.so.1\0"),
        ]);
        let found = Cuda::look(root.path(), None);
        assert_eq!(found.driver.as_deref(), Some("550.54.15"));
        assert_eq!(found.library, Some(shown(&root, "opt/driver/libcuda.so.1")));
        assert_eq!((found.devices, &*found.names), (2, &["NVIDIA X1".to_owned()][..]));
        assert!(found.is_usable());
        assert_eq!(version_in(OPEN).as_deref(), Some("570.86.10"));
    }

    #[test]
    fn the_variable_comes_first_and_need_not_help() {
        let root = machine(&[("usr/lib64/libcuda.so.1", b"\x7fELF\x02")]);
        let other = machine(&[("libcuda.so.1", b"\x7fELF\x02"), ("empty/x", b"")]);
        let search = std::env::join_paths([other.path().join("empty"), other.path().into()]);
        let found = Cuda::look(root.path(), search.ok().as_deref());
        assert_eq!(found.library, Some(shown(&other, "libcuda.so.1")));
        let found = Cuda::look(root.path(), None);
        assert_eq!(found.library, Some(shown(&root, "usr/lib64/libcuda.so.1")));
        assert!(!found.is_usable() && !found.is_absent());
    }

    #[test]
    fn a_machine_without_one() {
        assert!(Cuda::look(machine(&[("dev/null", b"")]).path(), None).is_absent());
    }
}
