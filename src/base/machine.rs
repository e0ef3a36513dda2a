//! The memory that this process may use: MemAvailable, the headroom of its cgroup, the quota
//! for locked memory, huge pages. Facts are read below a root folder, so that tests can
//! provide one.

use std::path::{Path, PathBuf};

use crate::base::fork::page_bytes;
use crate::base::status::{Error, Result};

/// A cgroup limit above this is no limit; v1 reports "none" as a huge number.
const NO_LIMIT_BYTES: u64 = 1 << 60;

/// The tightest memory limit among the cgroup of this process and its ancestors.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CgroupMemory {
    /// The cgroup version, 1 or 2.
    pub version: u32,
    /// The limit.
    pub limit_bytes: u64,
    /// Bytes charged now.
    pub usage_bytes: u64,
    /// Bytes among those of clean file cache, which the kernel reclaims under pressure.
    pub reclaimable_bytes: u64,
}

impl CgroupMemory {
    /// Bytes that may still be used below the limit.
    pub fn headroom_bytes(&self) -> u64 {
        let used = self.usage_bytes.saturating_sub(self.reclaimable_bytes);
        self.limit_bytes.saturating_sub(used)
    }
}

/// Memory of the machine, and limits of this process.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct MemoryFacts {
    /// RAM of the machine.
    pub total_bytes: u64,
    /// The kernel's estimate of the bytes available without swapping.
    pub available_bytes: u64,
    /// The tightest cgroup limit, if there is one.
    pub cgroup: Option<CgroupMemory>,
    /// Bytes that this process may lock; `None` = unlimited.
    pub lock_limit_bytes: Option<u64>,
    /// Bytes that it has locked.
    pub locked_bytes: u64,
    /// Mode of transparent huge pages: `always`, `madvise`, `never` or empty.
    pub thp_mode: String,
    /// Size of an explicit huge page; 0 = none.
    pub hugetlb_page_bytes: u64,
    /// Free explicit huge pages.
    pub hugetlb_free_pages: u64,
}

impl MemoryFacts {
    /// Reads the facts of this machine.
    pub fn probe() -> MemoryFacts {
        let mut facts = MemoryFacts::read(Path::new("/"));
        facts.lock_limit_bytes = lock_limit_bytes();
        facts
    }

    /// Reads the facts below `root` instead of `/`.
    pub fn read(root: &Path) -> MemoryFacts {
        let text = |path: &str| std::fs::read_to_string(root.join(path)).unwrap_or_default();
        let meminfo = text("proc/meminfo");
        let kib = |name| labelled(&meminfo, name).unwrap_or(0);
        let thp = text("sys/kernel/mm/transparent_hugepage/enabled");
        let chosen = thp.split(['[', ']']).nth(1).unwrap_or("");
        MemoryFacts {
            total_bytes: kib("MemTotal:") * 1024,
            available_bytes: kib("MemAvailable:") * 1024,
            cgroup: tightest_cgroup(root),
            lock_limit_bytes: None,
            locked_bytes: labelled(&text("proc/self/status"), "VmLck:").unwrap_or(0) * 1024,
            thp_mode: chosen.to_string(),
            hugetlb_page_bytes: kib("Hugepagesize:") * 1024,
            hugetlb_free_pages: kib("HugePages_Free:"),
        }
    }

    /// Bytes that this process may still use: MemAvailable or the cgroup's headroom, the
    /// smaller.
    pub fn effective_bytes(&self) -> u64 {
        match &self.cgroup {
            Some(cgroup) => cgroup.headroom_bytes().min(self.available_bytes),
            None => self.available_bytes,
        }
    }

    /// RAM of the machine, or the cgroup's limit if that is less.
    pub fn usable_bytes(&self) -> u64 {
        self.total_bytes.min(self.cgroup.map_or(u64::MAX, |cgroup| cgroup.limit_bytes))
    }

    /// Whether the limit of the cgroup decides what this process may use, not the machine.
    pub fn is_limited(&self) -> bool {
        self.cgroup.is_some_and(|cgroup| {
            cgroup.limit_bytes < self.total_bytes && cgroup.headroom_bytes() <= self.available_bytes
        })
    }

    /// Bytes that this process may still lock.
    pub fn lockable_bytes(&self) -> u64 {
        match self.lock_limit_bytes {
            None => u64::MAX,
            Some(limit) => limit.saturating_sub(self.locked_bytes),
        }
    }
}

/// Descriptors that this process may have open.
pub fn descriptor_limit() -> u64 {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: `limit` is valid and writable.
    match unsafe { libc::getrlimit(libc::RLIMIT_NOFILE, &mut limit) } {
        0 => limit.rlim_cur,
        _ => 0,
    }
}

fn lock_limit_bytes() -> Option<u64> {
    if has_ipc_lock() {
        return None;
    }
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: `limit` is valid and writable.
    let rc = unsafe { libc::getrlimit(libc::RLIMIT_MEMLOCK, &mut limit) };
    match (rc, limit.rlim_cur) {
        (0, libc::RLIM_INFINITY) => None,
        (0, bytes) => Some(bytes / page_bytes() as u64 * page_bytes() as u64),
        _ => Some(0),
    }
}

/// Whether this process has CAP_IPC_LOCK, which lifts the quota for locked memory.
fn has_ipc_lock() -> bool {
    const CAP_IPC_LOCK: u32 = 14;
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    status
        .lines()
        .find_map(|line| line.strip_prefix("CapEff:"))
        .and_then(|hex| u64::from_str_radix(hex.trim(), 16).ok())
        .is_some_and(|caps| caps >> CAP_IPC_LOCK & 1 == 1)
}

fn labelled(text: &str, label: &str) -> Option<u64> {
    let line = text.lines().find_map(|line| line.strip_prefix(label))?;
    line.split_whitespace().next()?.parse().ok()
}

/// The file names of a cgroup version.
struct Hierarchy {
    version: u32,
    limit: &'static str,
    usage: &'static str,
    inactive: &'static str,
}

const V2: Hierarchy = Hierarchy {
    version: 2,
    limit: "memory.max",
    usage: "memory.current",
    inactive: "inactive_file ",
};
const V1: Hierarchy = Hierarchy {
    version: 1,
    limit: "memory.limit_in_bytes",
    usage: "memory.usage_in_bytes",
    inactive: "total_inactive_file ",
};

fn tightest_cgroup(root: &Path) -> Option<CgroupMemory> {
    let text = |path: &str| std::fs::read_to_string(root.join(path)).unwrap_or_default();
    let (member, mounts) = (text("proc/self/cgroup"), text("proc/self/mountinfo"));
    let mut found: Vec<CgroupMemory> = Vec::new();
    for line in member.lines() {
        let mut fields = line.splitn(3, ':');
        let (_, Some(controllers), Some(path)) = (fields.next(), fields.next(), fields.next())
        else {
            continue;
        };
        let hierarchy = match controllers {
            "" => &V2,
            c if c.split(',').any(|c| c == "memory") => &V1,
            _ => continue,
        };
        if let Some((mount, inner)) = mount_of(&mounts, hierarchy.version) {
            found.extend(limits_upwards(root, &mount, &inner, path, hierarchy));
        }
    }
    found.into_iter().min_by_key(CgroupMemory::headroom_bytes)
}

/// The mount point of a hierarchy, and the folder of the hierarchy that is mounted there.
fn mount_of(mountinfo: &str, version: u32) -> Option<(PathBuf, PathBuf)> {
    mountinfo.lines().find_map(|line| {
        let (left, right) = line.split_once(" - ")?;
        let mut right = right.split(' ');
        let (kind, options) = (right.next()?, right.nth(1).unwrap_or(""));
        let fits = match version {
            2 => kind == "cgroup2",
            _ => kind == "cgroup" && options.split(',').any(|o| o == "memory"),
        };
        let mut left = left.split(' ').skip(3);
        let (inner, point) = (left.next()?, left.next()?);
        fits.then(|| (PathBuf::from(point), PathBuf::from(inner)))
    })
}

fn limits_upwards(
    root: &Path,
    mount: &Path,
    inner: &Path,
    member: &str,
    names: &Hierarchy,
) -> Vec<CgroupMemory> {
    let top = root.join(mount.strip_prefix("/").unwrap_or(mount));
    let member = Path::new(member);
    // A container may see its own cgroup as the root of the mount.
    let relative =
        member.strip_prefix(inner).or_else(|_| member.strip_prefix("/")).unwrap_or(Path::new(""));
    let mut directory = top.join(relative);
    if !directory.is_dir() {
        directory = top.clone();
    }
    let mut found = Vec::new();
    loop {
        found.extend(limit_of(&directory, names));
        if directory == top || !directory.pop() {
            return found;
        }
    }
}

fn limit_of(directory: &Path, names: &Hierarchy) -> Option<CgroupMemory> {
    let text = |name: &str| std::fs::read_to_string(directory.join(name)).ok();
    let limit_bytes: u64 = text(names.limit)?.trim().parse().ok()?; // fails for "max"
    if limit_bytes >= NO_LIMIT_BYTES {
        return None;
    }
    let stat = text("memory.stat").unwrap_or_default();
    Some(CgroupMemory {
        version: names.version,
        limit_bytes,
        usage_bytes: text(names.usage)?.trim().parse().ok()?,
        reclaimable_bytes: labelled(&stat, names.inactive).unwrap_or(0),
    })
}

/// Random bytes from the kernel, for secrets.
pub fn random_bytes<const N: usize>() -> Result<[u8; N]> {
    let mut bytes = [0u8; N];
    let mut filled = 0;
    while filled < N {
        // SAFETY: the rest of the array, of that length.
        let got = unsafe { libc::getrandom(bytes[filled..].as_mut_ptr().cast(), N - filled, 0) };
        match usize::try_from(got) {
            Ok(got) => filled += got,
            Err(_) if std::io::Error::last_os_error().kind() == std::io::ErrorKind::Interrupted => {
            }
            Err(_) => return Err(Error::os("cannot read random bytes")),
        }
    }
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Tree(PathBuf);

    impl Tree {
        fn new(name: &str) -> Tree {
            let path = std::env::temp_dir().join(format!("kvt-{}-{name}", std::process::id()));
            let _ = std::fs::remove_dir_all(&path);
            Tree(path)
        }

        fn file(&self, path: &str, text: &str) -> &Tree {
            let path = self.0.join(path);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
            self
        }
    }

    impl Drop for Tree {
        fn drop(&mut self) {
            let _ = std::fs::remove_dir_all(&self.0);
        }
    }

    const MEMINFO: &str = "MemTotal: 1000 kB\nMemAvailable: 800 kB\nHugepagesize: 2048 kB\n";

    #[test]
    fn v2_uses_the_tightest_ancestor() {
        let tree = Tree::new("v2");
        tree.file("proc/meminfo", MEMINFO)
            .file("proc/self/cgroup", "0::/a/b\n")
            .file("proc/self/mountinfo", "30 1 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n")
            .file("sys/fs/cgroup/a/memory.max", "500000\n")
            .file("sys/fs/cgroup/a/memory.current", "450000\n")
            .file("sys/fs/cgroup/a/memory.stat", "anon 1\ninactive_file 100000\n")
            .file("sys/fs/cgroup/a/b/memory.max", "max\n")
            .file("sys/fs/cgroup/a/b/memory.current", "1\n");
        let facts = MemoryFacts::read(&tree.0);
        assert_eq!(facts.cgroup.unwrap().version, 2);
        assert_eq!(facts.effective_bytes(), 150_000);
    }

    #[test]
    fn v1_limits_are_read_in_a_container() {
        let tree = Tree::new("v1");
        tree.file("proc/meminfo", MEMINFO)
            .file("proc/self/cgroup", "4:cpu:/x\n3:memory:/docker/abc\n")
            .file(
                "proc/self/mountinfo",
                "31 1 0:27 /docker/abc /sys/fs/cgroup/memory ro - cgroup cgroup rw,memory\n",
            )
            .file("sys/fs/cgroup/memory/memory.limit_in_bytes", "300000\n")
            .file("sys/fs/cgroup/memory/memory.usage_in_bytes", "200000\n")
            .file("sys/fs/cgroup/memory/memory.stat", "total_inactive_file 50000\n");
        assert_eq!(MemoryFacts::read(&tree.0).effective_bytes(), 150_000);
        tree.file("sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n");
        let facts = MemoryFacts::read(&tree.0);
        assert_eq!((facts.cgroup, facts.effective_bytes()), (None, 800 * 1024));
    }

    #[test]
    fn nothing_readable_means_nothing_available() {
        let tree = Tree::new("empty");
        assert_eq!(MemoryFacts::read(&tree.0).effective_bytes(), 0);
    }

    #[test]
    fn this_machine_has_memory() {
        let facts = MemoryFacts::probe();
        assert!(facts.effective_bytes() > 0 && facts.effective_bytes() <= facts.total_bytes);
    }
}
