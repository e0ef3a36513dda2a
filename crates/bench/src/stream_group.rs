//! Memory cgroups of both versions. Files are read below a root folder, so that tests can provide
//! one.

use std::path::{Path, PathBuf};
use std::time::Duration;

use super::fixtures::{Outcome, say};

/// A memory cgroup that the drop removes.
pub struct Group {
    dir: PathBuf,
    version: &'static Version,
}

/// The file names of a version.
struct Version {
    number: u32,
    kind: &'static str,
    limit: &'static str,
    peak: &'static str,
    /// The file in which 0 disables swap.
    swap: &'static str,
    /// Note on the first kernel with a peak.
    peak_since: &'static str,
}

static V1: Version = Version {
    number: 1,
    kind: "cgroup",
    limit: "memory.limit_in_bytes",
    peak: "memory.max_usage_in_bytes",
    swap: "memory.swappiness",
    peak_since: "",
};
static V2: Version = Version {
    number: 2,
    kind: "cgroup2",
    limit: "memory.max",
    peak: "memory.peak",
    swap: "memory.swap.max",
    peak_since: " (Linux has it since 5.19)",
};

/// A mounted hierarchy.
struct Mount {
    point: PathBuf,
    /// The folder of the hierarchy that is mounted.
    inner: PathBuf,
    version: &'static Version,
}

fn mounts(mountinfo: &str) -> Vec<Mount> {
    let mount = |line: &str| {
        let (left, right) = line.split_once(" - ")?;
        let mut left = left.split(' ').skip(3);
        let (inner, point) = (left.next()?.into(), left.next()?.into());
        let mut right = right.split(' ');
        let (kind, options) = (right.next()?, right.nth(1).unwrap_or(""));
        let version = [&V1, &V2].into_iter().find(|version| version.kind == kind)?;
        let fits = version.number == 2 || options.split(',').any(|option| option == "memory");
        fits.then_some(Mount { point, inner, version })
    };
    mountinfo.lines().filter_map(mount).collect()
}

/// The path of this process in a hierarchy.
fn own_path<'a>(member: &'a str, version: &Version) -> Option<&'a str> {
    member.lines().find_map(|line| {
        let mut fields = line.splitn(3, ':').skip(1);
        let (controllers, path) = (fields.next()?, fields.next()?);
        let fits = match version.number {
            2 => controllers.is_empty(),
            _ => controllers.split(',').any(|controller| controller == "memory"),
        };
        fits.then_some(path)
    })
}

impl Mount {
    /// Parents for a new cgroup: the top, the own cgroup, and those in between.
    fn parents(&self, root: &Path, member: &str) -> Vec<PathBuf> {
        let top = root.join(self.point.strip_prefix("/").unwrap_or(&self.point));
        let own = Path::new(own_path(member, self.version).unwrap_or("/"));
        // A container may see its own cgroup as the root of the mount.
        let below = own.strip_prefix(&self.inner).or_else(|_| own.strip_prefix("/"));
        let mut all = vec![top.clone()];
        let mut dir = top.join(below.unwrap_or(Path::new("")));
        while dir != top && dir.starts_with(&top) {
            if dir.is_dir() {
                all.push(dir.clone());
            }
            dir.pop();
        }
        all
    }
}

/// Fails with the reason if children of a cgroup cannot have limits.
fn can_limit(parent: &Path, version: &Version) -> Outcome<()> {
    if version.number == 1 {
        return Ok(());
    }
    let has = |name: &str| {
        let text = std::fs::read_to_string(parent.join(name)).unwrap_or_default();
        text.split_whitespace().any(|controller| controller == "memory")
    };
    match (has("cgroup.subtree_control"), has("cgroup.controllers")) {
        (true, _) => Ok(()),
        // Only the root cgroup may have processes and enable controllers for its children.
        (false, true) => Err("memory is not in its cgroup.subtree_control".into()),
        (false, false) => Err("no memory controller is available".into()),
    }
}

/// Why a folder, and some folders below it, cannot have a new cgroup.
struct Refusal {
    parent: PathBuf,
    below: u32,
    words: String,
}

impl Refusal {
    fn text(&self) -> String {
        let below = if self.below > 0 { format!(" and {} below", self.below) } else { "".into() };
        format!("{}{below}: {}", self.parent.display(), self.words)
    }
}

impl Group {
    /// Creates a cgroup with a limit; fails with the reasons of all parents.
    pub fn new(name: &str, limit_bytes: u64) -> Outcome<Group> {
        Group::within(Path::new("/"), name, limit_bytes)
    }

    /// Creates a cgroup below `root` instead of `/`.
    fn within(root: &Path, name: &str, limit_bytes: u64) -> Outcome<Group> {
        let text = |path: &str| std::fs::read_to_string(root.join(path)).unwrap_or_default();
        let (mountinfo, member) = (text("proc/self/mountinfo"), text("proc/self/cgroup"));
        let mut why: Vec<Refusal> = Vec::new();
        for mount in mounts(&mountinfo) {
            for parent in mount.parents(root, &member) {
                let words = match Group::make(&parent, mount.version, name, limit_bytes) {
                    Ok(group) => return Ok(group),
                    Err(words) => words,
                };
                match why.last_mut() {
                    Some(last) if last.words == words && parent.starts_with(&last.parent) => {
                        last.below += 1;
                    }
                    _ => why.push(Refusal { parent, below: 0, words }),
                }
            }
        }
        let why: Vec<String> = why.iter().map(Refusal::text).collect();
        match why.is_empty() {
            true => Err("no memory cgroup: none are mounted".into()),
            false => Err(format!("no memory cgroup: {}", why.join("; "))),
        }
    }

    fn make(
        parent: &Path,
        version: &'static Version,
        name: &str,
        limit_bytes: u64,
    ) -> Outcome<Group> {
        can_limit(parent, version)?;
        let dir = parent.join(format!("kvtier-bench-{}-{name}", std::process::id()));
        std::fs::create_dir(&dir).map_err(say)?;
        let group = Group { dir, version };
        let limit = group.dir.join(version.limit);
        std::fs::write(limit, limit_bytes.to_string())
            .map_err(|error| format!("{}: {error}", version.limit))?;
        // Fails without harm on a machine without swap.
        drop(std::fs::write(group.dir.join(version.swap), "0"));
        Ok(group)
    }

    /// The folder of the cgroup.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// The most bytes charged to the cgroup.
    pub fn peak_bytes(&self) -> Outcome<u64> {
        let Version { peak, peak_since, .. } = self.version;
        let text = std::fs::read_to_string(self.dir.join(peak))
            .map_err(|error| format!("{peak}{peak_since}: {error}"))?;
        text.trim().parse().map_err(|_| format!("{peak} has {text:?}"))
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        // An ended process leaves the cgroup a moment later.
        for _ in 0..100 {
            if std::fs::remove_dir(&self.dir).is_ok() {
                return;
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        eprintln!("cannot remove {}", self.dir.display());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A tree that looks like `/`. Writing a file of a cgroup creates it, unlike in a kernel's
    /// kernel's would not be.
    struct Tree(PathBuf);

    impl Tree {
        fn new(name: &str, mountinfo: &str, member: &str) -> Tree {
            let name = format!("kvtier-group-{}-{name}", std::process::id());
            let tree = Tree(std::env::temp_dir().join(name));
            drop(std::fs::remove_dir_all(&tree.0));
            tree.file("proc/self/mountinfo", mountinfo);
            tree.file("proc/self/cgroup", member);
            tree
        }

        fn file(&self, path: &str, text: &str) {
            let path = self.0.join(path);
            std::fs::create_dir_all(path.parent().expect("one")).expect("made");
            std::fs::write(path, text).expect("written");
        }

        fn make(&self) -> Outcome<Group> {
            Group::within(&self.0, "test", 1 << 20)
        }

        /// The parent directory of a new group, and the files written to it; the group is removed.
        fn made(&self) -> (String, Vec<(String, String)>) {
            let group = self.make().expect("a group");
            let dir = group.dir().to_path_buf();
            let mut files = Vec::new();
            for entry in std::fs::read_dir(&dir).expect("found") {
                let path = entry.expect("one").path();
                let name = path.file_name().expect("one").to_string_lossy().into_owned();
                files.push((name, std::fs::read_to_string(&path).expect("text")));
                // A kernel's files go with their directory.
                std::fs::remove_file(path).expect("file");
            }
            files.sort();
            drop(group);
            assert!(!dir.exists());
            let parent = dir.parent().and_then(|dir| dir.strip_prefix(&self.0).ok());
            (parent.expect("inside").to_string_lossy().into_owned(), files)
        }
    }

    impl Drop for Tree {
        fn drop(&mut self) {
            drop(std::fs::remove_dir_all(&self.0));
        }
    }

    fn pair(name: &str, text: &str) -> (String, String) {
        (name.to_string(), text.to_string())
    }

    const V1_MOUNTS: &str = "\
        31 23 0:28 / /sys/fs/cgroup rw,relatime - tmpfs tmpfs rw,mode=755\n\
        32 31 0:29 / /sys/fs/cgroup/cpu rw,relatime - cgroup cgroup rw,cpu\n\
        35 31 0:32 / /sys/fs/cgroup/memory rw,relatime shared:9 - cgroup cgroup rw,memory\n";
    const V2_MOUNT: &str = "30 23 0:26 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw\n";

    #[test]
    fn version_1_uses_its_own_file_names() {
        let tree = Tree::new("v1", V1_MOUNTS, "4:memory:/a\n0::/\n");
        tree.file("sys/fs/cgroup/memory/tasks", "");
        let (parent, files) = tree.made();
        assert_eq!(parent, "sys/fs/cgroup/memory");
        let expected = [pair("memory.limit_in_bytes", "1048576"), pair("memory.swappiness", "0")];
        assert_eq!(files, expected);
    }

    #[test]
    fn version_2_requires_the_memory_controller_in_the_parent() {
        let tree = Tree::new("v2", V2_MOUNT, "0::/\n");
        tree.file("sys/fs/cgroup/cgroup.controllers", "cpu io memory\n");
        tree.file("sys/fs/cgroup/cgroup.subtree_control", "cpu memory\n");
        let (parent, files) = tree.made();
        assert_eq!(parent, "sys/fs/cgroup");
        assert_eq!(files, [pair("memory.max", "1048576"), pair("memory.swap.max", "0")]);
    }

    #[test]
    fn ancestors_of_the_own_cgroup_are_tried() {
        let tree = Tree::new("between", V2_MOUNT, "0::/user/app/run\n");
        let top = "sys/fs/cgroup";
        // The own cgroup has processes, so it cannot delegate controllers.
        tree.file(&format!("{top}/user/app/run/cgroup.controllers"), "memory\n");
        tree.file(&format!("{top}/user/app/run/cgroup.subtree_control"), "\n");
        tree.file(&format!("{top}/user/app/cgroup.subtree_control"), "memory\n");
        assert_eq!(tree.made().0, "sys/fs/cgroup/user/app");
        tree.file(&format!("{top}/user/app/run/cgroup.subtree_control"), "memory\n");
        assert_eq!(tree.made().0, "sys/fs/cgroup/user/app/run");
    }

    #[test]
    fn a_container_may_see_its_own_cgroup_as_the_top() {
        let inside = V2_MOUNT.replacen(" / ", " /docker/abc ", 1);
        let tree = Tree::new("container", &inside, "0::/docker/abc/job\n");
        tree.file("sys/fs/cgroup/job/cgroup.subtree_control", "memory\n");
        assert_eq!(tree.made().0, "sys/fs/cgroup/job");
    }

    #[test]
    fn errors_name_the_reason_for_each_directory() {
        let none = Tree::new("none", "21 1 0:1 / /proc rw - proc proc rw\n", "");
        assert_eq!(none.make().err().expect("none"), "no memory cgroup: none are mounted");

        let tree = Tree::new("bare", V2_MOUNT, "0::/own\n");
        tree.file("sys/fs/cgroup/own/cgroup.controllers", "memory pids\n");
        tree.file("sys/fs/cgroup/own/cgroup.subtree_control", "pids\n");
        let why = tree.make().err().expect("none");
        assert!(why.contains("fs/cgroup: no memory controller is available; "), "{why}");
        assert!(
            why.ends_with("fs/cgroup/own: memory is not in its cgroup.subtree_control"),
            "{why}"
        );
        assert_eq!(std::fs::read_dir(tree.0.join("sys/fs/cgroup")).expect("it").count(), 1);

        // Equal reasons of the root and of its descendants are reported once.
        let tree = Tree::new("bare-twice", V2_MOUNT, "0::/a/b\n");
        std::fs::create_dir_all(tree.0.join("sys/fs/cgroup/a/b")).expect("made");
        let why = tree.make().err().expect("none");
        assert!(why.ends_with("fs/cgroup and 2 below: no memory controller is available"), "{why}");

        // The root of a version 1 hierarchy does not exist.
        let tree = Tree::new("gone", V1_MOUNTS, "4:memory:/\n");
        let why = tree.make().err().expect("none");
        assert!(why.contains("cgroup/memory: No such file"), "{why}");
    }

    #[test]
    fn a_missing_or_invalid_peak_is_an_error() {
        let tree = Tree::new("peak", V2_MOUNT, "0::/\n");
        tree.file("sys/fs/cgroup/cgroup.subtree_control", "memory\n");
        let group = tree.make().expect("a group");
        assert!(group.peak_bytes().expect_err("none").contains("since 5.19"));
        std::fs::write(group.dir().join("memory.peak"), "4096\n").expect("written");
        assert_eq!(group.peak_bytes(), Ok(4096));
        std::fs::write(group.dir().join("memory.peak"), "much\n").expect("written");
        assert!(group.peak_bytes().expect_err("no number").contains("much"));
        for entry in std::fs::read_dir(group.dir()).expect("found") {
            std::fs::remove_file(entry.expect("one").path()).expect("file");
        }
    }
}
