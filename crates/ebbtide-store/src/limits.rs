//! How much memory and disk this process may use: the machine's, or less in a container.

use std::fs::read_to_string;
use std::path::{Path, PathBuf};

use rustix::fs::statvfs;

/// Bytes that this process can still write to the file system of a folder. `None` if that does not
/// tell.
///
/// ```
/// use std::path::Path;
///
/// assert!(ebbtide_store::free_space(Path::new("/")).is_some());
/// assert_eq!(ebbtide_store::free_space(Path::new("/no/such/folder")), None);
/// ```
pub fn free_space(dir: &Path) -> Option<u64> {
    statvfs(dir).ok().map(|all| all.f_bavail.saturating_mul(all.f_frsize))
}

/// Bytes of memory this process may use at most: the smallest limit of its control group and the
/// groups around it (version 1 or 2), or the machine's memory. `None` if nothing can be read.
pub fn memory_limit() -> Option<u64> {
    memory_limit_below(Path::new("/"))
}

fn memory_limit_below(root: &Path) -> Option<u64> {
    let cgroups = read_to_string(root.join("proc/self/cgroup")).unwrap_or_default();
    let groups = cgroups.lines().filter_map(group_files).flatten();
    let limits = groups.filter_map(|file| {
        // `max` does not parse: no limit here.
        read_to_string(root.join(file)).ok()?.trim().parse().ok()
    });
    limits.chain(machine_memory(root)).min()
}

/// The files that may hold a limit, for a line `hierarchy:controllers:path` of `/proc/self/cgroup`:
/// that of the group and those of its ancestors, which bound it, too.
fn group_files(line: &str) -> Option<Vec<PathBuf>> {
    let mut fields = line.splitn(3, ':').skip(1);
    let (controllers, path) = (fields.next()?, fields.next()?);
    let (mount, file) = match controllers {
        "" => ("sys/fs/cgroup", "memory.max"),
        list if list.split(',').any(|c| c == "memory") => {
            ("sys/fs/cgroup/memory", "memory.limit_in_bytes")
        }
        _ => return None,
    };
    let path = Path::new(path.trim_start_matches('/'));
    Some(path.ancestors().map(|group| Path::new(mount).join(group).join(file)).collect())
}

fn machine_memory(root: &Path) -> Option<u64> {
    let meminfo = read_to_string(root.join("proc/meminfo")).ok()?;
    let total = meminfo.lines().find_map(|line| line.strip_prefix("MemTotal:"))?;
    total.trim().strip_suffix(" kB")?.trim().parse::<u64>().ok()?.checked_mul(1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A machine of 1000 KiB with these files below its root.
    fn limit(files: &[(&str, &str)]) -> Option<u64> {
        let root = tempfile::tempdir().unwrap();
        let meminfo = ("proc/meminfo", "MemFree: 1 kB\nMemTotal:        1000 kB\n");
        for (path, content) in [meminfo].iter().chain(files) {
            let path = root.path().join(path);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, content).unwrap();
        }
        memory_limit_below(root.path())
    }

    #[test]
    fn c15_the_smallest_limit_around_the_container_counts() {
        let group = ("proc/self/cgroup", "0::/a/b\n");
        let outer = ("sys/fs/cgroup/a/memory.max", "2000\n");
        assert_eq!(limit(&[group, outer, ("sys/fs/cgroup/a/b/memory.max", "max\n")]), Some(2000));
        assert_eq!(limit(&[group, outer, ("sys/fs/cgroup/a/b/memory.max", "900\n")]), Some(900));
        assert_eq!(limit(&[group, ("sys/fs/cgroup/memory.max", "70\n")]), Some(70));
    }

    #[test]
    fn c15_version_1_of_control_groups() {
        let group = ("proc/self/cgroup", "7:cpu,memory:/job\n3:freezer:/\n");
        let limited = ("sys/fs/cgroup/memory/job/memory.limit_in_bytes", "512\n");
        assert_eq!(limit(&[group, limited]), Some(512));
        let huge = ("sys/fs/cgroup/memory/job/memory.limit_in_bytes", "9223372036854771712\n");
        assert_eq!(limit(&[group, huge]), Some(1_024_000));
    }

    #[test]
    fn without_groups_the_machine_is_the_limit() {
        assert_eq!(limit(&[]), Some(1_024_000));
        assert_eq!(memory_limit_below(Path::new("/no/such/root")), None);
        assert!(memory_limit().unwrap() > 1 << 20);
    }
}
