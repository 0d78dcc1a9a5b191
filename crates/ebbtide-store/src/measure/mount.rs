//! Which file system a folder is on, as the kernel names it.

use std::os::unix::ffi::OsStrExt;
use std::path::Path;

/// The type of the file system that `dir` is on, such as `ext4`.
pub(super) fn file_system(dir: &Path) -> Option<String> {
    let mounts = std::fs::read("/proc/self/mounts").ok()?;
    let kind = kind_in(&mounts, &dir.canonicalize().ok()?)?;
    Some(String::from_utf8_lossy(&kind).into_owned())
}

/// The type in the line `device folder type options 0 0` whose folder is the longest around `dir`.
/// Of two mounts on one folder the later one is the visible one.
fn kind_in(mounts: &[u8], dir: &Path) -> Option<Vec<u8>> {
    let lines = mounts.split(|&byte| byte == b'\n').filter_map(|line| {
        let mut fields = line.split(|&byte| byte == b' ').skip(1);
        Some((unescaped(fields.next()?), fields.next()?))
    });
    let around =
        lines.filter(|(folder, _)| dir.starts_with(Path::new(std::ffi::OsStr::from_bytes(folder))));
    around.max_by_key(|(folder, _)| folder.len()).map(|(_, kind)| kind.to_vec())
}

/// Spaces and the like are written as a backslash and three octal digits.
fn unescaped(field: &[u8]) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(field.len());
    let mut rest = field;
    while let Some((&byte, after)) = rest.split_first() {
        let code = after.get(..3).filter(|_| byte == b'\\');
        let code = code.and_then(|digits| std::str::from_utf8(digits).ok());
        if let Some(code) = code.and_then(|digits| u8::from_str_radix(digits, 8).ok()) {
            bytes.push(code);
            rest = &after[3..];
        } else {
            bytes.push(byte);
            rest = after;
        }
    }
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_longest_folder_counts_and_the_later_mount() {
        let mounts = b"/dev/vda / ext4 rw 0 0\ntmpfs /a\\040b tmpfs rw 0 0\n\
                       /dev/vdb /a\\040b xfs rw 0 0\nx /a\\040bc proc rw 0 0\n";
        let kind = |dir: &str| kind_in(mounts, Path::new(dir)).unwrap();
        assert_eq!(kind("/x"), b"ext4");
        assert_eq!(kind("/a b/c"), b"xfs");
        assert_eq!(kind("/a b"), b"xfs");
        assert_eq!(kind("/a bc"), b"proc");
        assert_eq!(kind_in(b"", Path::new("/")), None);
        assert!(file_system(Path::new("/proc")).is_some());
    }
}
