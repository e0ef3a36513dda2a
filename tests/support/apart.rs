//! Tests that run in a process of their own: it may mount, give rights up and hit
//! limits, and nobody else notices. And the file systems and groups they need.
#![allow(dead_code)]

use std::ffi::CString;
use std::fs::File;
use std::os::fd::AsRawFd;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// Why a test cannot be run here.
pub type Skip = String;

const DIR: &str = "KVTIER_APART_DIR";

/// Runs a body in a process of its own, with a directory of its own. A body that
/// panics fails the test; one that says why it cannot run is passed over.
pub fn apart(test: &str, body: impl FnOnce(&Path) -> Result<(), Skip>) {
    if let Some(dir) = std::env::var_os(DIR) {
        match body(Path::new(&dir)) {
            Ok(()) => println!("\nended well"),
            Err(why) => println!("\nSKIP {why}"),
        }
        return;
    }
    let dir = std::env::temp_dir().join(format!("kvt-{test}-{}", std::process::id()));
    drop(std::fs::remove_dir_all(&dir));
    std::fs::create_dir(&dir).expect("a directory");
    let mut command = Command::new(std::env::current_exe().expect("this program"));
    command
        .args(["--exact", test, "--include-ignored", "--nocapture", "--test-threads=1"])
        .env(DIR, &dir);
    // SAFETY: system calls and nothing else.
    unsafe { command.pre_exec(|| own_mounts().map_or(Ok(()), Err)) };
    let child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("started");
    let number = child.id();
    let output = child.wait_with_output().expect("it ended");
    drop(std::fs::remove_dir_all(&dir));
    // One that was killed has left its group behind.
    GROUPS.iter().for_each(|(top, _)| drop(std::fs::remove_dir(group_of(top, number))));
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    let (out, err) = (text(&output.stdout), text(&output.stderr));
    assert!(output.status.success(), "{}\n{out}\n{err}", output.status);
    match out.lines().find(|line| line.starts_with("SKIP ")) {
        Some(line) => println!("{test}: {line}"),
        None => assert!(out.contains("\nended well"), "{out}\n{err}"),
    }
}

/// A mount namespace for a process that has not begun yet; as root of a user
/// namespace where that is what it takes. Without either, mounts fail later.
fn own_mounts() -> Option<std::io::Error> {
    // SAFETY: integers and static strings.
    unsafe {
        let (user, group) = (libc::geteuid(), libc::getegid());
        if libc::unshare(libc::CLONE_NEWNS) == 0 {
            libc::mount(
                c"none".as_ptr(),
                c"/".as_ptr(),
                std::ptr::null(),
                libc::MS_REC | libc::MS_PRIVATE,
                std::ptr::null(),
            );
        } else if libc::unshare(libc::CLONE_NEWUSER | libc::CLONE_NEWNS) == 0 {
            map(c"/proc/self/setgroups", "deny", u32::MAX);
            map(c"/proc/self/uid_map", "0 ", user);
            map(c"/proc/self/gid_map", "0 ", group);
        }
    }
    None
}

/// Writes `text`, and `0 ID 1` where there is an id; without allocating.
fn map(path: &std::ffi::CStr, text: &str, id: u32) {
    let mut line = [0u8; 32];
    let mut length = 0;
    let mut add = |bytes: &[u8]| {
        line[length..length + bytes.len()].copy_from_slice(bytes);
        length += bytes.len();
    };
    add(text.as_bytes());
    if id != u32::MAX {
        let mut digits = [0u8; 10];
        let (mut rest, mut at) = (id, digits.len());
        loop {
            at -= 1;
            digits[at] = b'0' + (rest % 10) as u8;
            rest /= 10;
            if rest == 0 {
                break;
            }
        }
        add(&digits[at..]);
        add(b" 1");
    }
    // SAFETY: a path with an end, and bytes of our own.
    unsafe {
        let fd = libc::open(path.as_ptr(), libc::O_WRONLY);
        if fd >= 0 {
            libc::write(fd, line.as_ptr().cast(), length);
            libc::close(fd);
        }
    }
}

fn text(path: &Path) -> CString {
    CString::new(path.to_str().expect("text")).expect("text")
}

fn mount(what: &str, at: &Path, kind: &str, options: &str) -> Result<(), Skip> {
    std::fs::create_dir_all(at).expect("a directory");
    let words = [what, kind, options].map(|word| CString::new(word).expect("text"));
    let [what, kind, options] = &words;
    // SAFETY: strings with an end.
    let rc = unsafe {
        let data = options.as_ptr().cast();
        libc::mount(what.as_ptr(), text(at).as_ptr(), kind.as_ptr(), 0, data)
    };
    match rc {
        0 => Ok(()),
        _ => Err(format!("mounting {kind:?}: {}", std::io::Error::last_os_error())),
    }
}

/// A file system in memory, of so many bytes.
pub fn tmpfs(at: &Path, bytes: u64) -> Result<(), Skip> {
    mount("tmpfs", at, "tmpfs", &format!("size={bytes},mode=0700"))
}

/// A block device that can be made to fail: what lies behind its end cannot be read
/// or written, and its end can be moved.
pub struct Loop {
    device: File,
    status: [u8; 232],
}

const LOOP_SET_FD: u64 = 0x4C00;
const LOOP_SET_STATUS64: u64 = 0x4C04;
const LOOP_CTL_GET_FREE: u64 = 0x4C82;
/// Where `lo_sizelimit` and `lo_flags` lie in `loop_info64`.
const SIZE_LIMIT: usize = 32;
const FLAGS: usize = 52;
/// It is given back when nobody has it open or mounted.
const AUTOCLEAR: u32 = 4;

impl Loop {
    /// A file system of the usual kind on a file in a directory, mounted at another.
    pub fn mounted(dir: &Path, at: &Path, bytes: u64) -> Result<Loop, Skip> {
        let say = |what: &str| {
            let what = what.to_string();
            move |error: std::io::Error| format!("{what}: {error}")
        };
        let path = dir.join("device");
        let file = File::options().read(true).write(true).create_new(true).open(&path);
        let file =
            file.and_then(|file| file.set_len(bytes).map(|()| file)).map_err(say("a file"))?;
        let tool =
            ["/usr/sbin/mkfs.ext4", "/sbin/mkfs.ext4"].into_iter().find(|p| Path::new(p).exists());
        let tool = tool.ok_or("mkfs.ext4 is not installed")?;
        // Few tables, so that all of them lie before what files have.
        let args = ["-q", "-F", "-O", "^has_journal", "-N", "64", "-m", "0"];
        let made = Command::new(tool).args(args).arg(&path).output().map_err(say(tool))?;
        if !made.status.success() {
            return Err(format!("{tool}: {}", String::from_utf8_lossy(&made.stderr)));
        }
        let control = File::options().read(true).write(true).open("/dev/loop-control");
        let control = control.map_err(say("/dev/loop-control"))?;
        // SAFETY: no memory is involved.
        let number = unsafe { libc::ioctl(control.as_raw_fd(), LOOP_CTL_GET_FREE) };
        let name = format!("/dev/loop{number}");
        let device = File::options().read(true).write(true).open(&name).map_err(say(&name))?;
        // SAFETY: descriptors.
        if unsafe { libc::ioctl(device.as_raw_fd(), LOOP_SET_FD, file.as_raw_fd()) } != 0 {
            return Err(say(&name)(std::io::Error::last_os_error()));
        }
        let mut device = Loop { device, status: [0; 232] };
        device.status[FLAGS..FLAGS + 4].copy_from_slice(&AUTOCLEAR.to_le_bytes());
        device.ends_at(0)?;
        mount(&name, at, "ext4", "errors=continue")?;
        Ok(device)
    }

    /// Moves its end; 0 = to where it was.
    pub fn ends_at(&mut self, bytes: u64) -> Result<(), Skip> {
        self.status[SIZE_LIMIT..SIZE_LIMIT + 8].copy_from_slice(&bytes.to_le_bytes());
        // SAFETY: a `loop_info64` of our own.
        let rc = unsafe {
            libc::ioctl(self.device.as_raw_fd(), LOOP_SET_STATUS64, self.status.as_ptr())
        };
        match rc {
            0 => Ok(()),
            _ => Err(format!("the end of a device: {}", std::io::Error::last_os_error())),
        }
    }
}

/// Becomes a user for whom rights count, for good; what it makes from now on, in a
/// directory too, is that user's.
pub fn become_nobody(dir: &Path) -> Result<(), Skip> {
    const NOBODY: u32 = 65_534;
    // SAFETY: no memory is involved.
    if unsafe { libc::geteuid() } != 0 {
        return Ok(());
    }
    if std::os::unix::fs::chown(dir, Some(NOBODY), Some(NOBODY)).is_err() {
        // Root of a user namespace, in which there is nobody else.
        return drop_capabilities();
    }
    // SAFETY: no memory is involved.
    let rc = unsafe {
        libc::setresgid(NOBODY, NOBODY, NOBODY) | libc::setresuid(NOBODY, NOBODY, NOBODY)
    };
    match rc {
        0 => Ok(()),
        _ => Err(format!("becoming another user: {}", std::io::Error::last_os_error())),
    }
}

/// What root may do beyond others, this thread and those that it starts may not.
fn drop_capabilities() -> Result<(), Skip> {
    const VERSION: u32 = 0x2008_0522;
    let (header, none) = ([VERSION, 0], [0u32; 6]);
    // SAFETY: structs of the system's, in words.
    match unsafe { libc::syscall(libc::SYS_capset, header.as_ptr(), none.as_ptr()) } {
        0 => Ok(()),
        _ => Err(format!("dropping capabilities: {}", std::io::Error::last_os_error())),
    }
}

/// The longest that files may be, from now on; what would go beyond fails.
pub fn longest_file(bytes: Option<u64>) {
    let cur = bytes.unwrap_or(libc::RLIM_INFINITY);
    let limit = libc::rlimit { rlim_cur: cur, rlim_max: libc::RLIM_INFINITY };
    // SAFETY: a limit of our own; the signal would end the process.
    unsafe {
        libc::signal(libc::SIGXFSZ, libc::SIG_IGN);
        assert_eq!(libc::setrlimit(libc::RLIMIT_FSIZE, &limit), 0);
    }
}

/// Where groups are made: the second way, the first; their files for the limit, the
/// most that was used, and how often the limit was met.
const GROUPS: [(&str, [&str; 3]); 2] = [
    ("/sys/fs/cgroup", ["memory.max", "memory.peak", "memory.events"]),
    (
        "/sys/fs/cgroup/memory",
        ["memory.limit_in_bytes", "memory.max_usage_in_bytes", "memory.failcnt"],
    ),
];

fn group_of(top: &str, process: u32) -> PathBuf {
    Path::new(top).join(format!("kvtier-test-{process}"))
}

/// A group of processes with a limit on their memory.
pub struct Group {
    dir: PathBuf,
    names: [&'static str; 3],
}

impl Group {
    /// One that this process is moved to.
    pub fn joined(bytes: u64) -> Result<Group, Skip> {
        let mut why = "no file system of cgroups is mounted".to_string();
        for (top, names) in GROUPS {
            let group = Group { dir: group_of(top, std::process::id()), names };
            match group.join(bytes) {
                Ok(()) => return Ok(group),
                Err(error) => why = format!("{}: {error}", group.dir.display()),
            }
        }
        Err(why)
    }

    fn join(&self, bytes: u64) -> std::io::Result<()> {
        std::fs::create_dir(&self.dir)?;
        // Where no groups are mounted it is a directory like any other.
        if !self.dir.join(self.names[0]).exists() {
            return Err(std::io::ErrorKind::Unsupported.into());
        }
        std::fs::write(self.dir.join(self.names[0]), bytes.to_string())?;
        std::fs::write(self.dir.join("cgroup.procs"), std::process::id().to_string())
    }

    /// The most that was charged to it at any moment, if that is told.
    pub fn peak_bytes(&self) -> Option<u64> {
        std::fs::read_to_string(self.dir.join(self.names[1])).ok()?.trim().parse().ok()
    }

    /// Times that its limit was met.
    pub fn hits(&self) -> u64 {
        let text = std::fs::read_to_string(self.dir.join(self.names[2])).unwrap_or_default();
        let line = text.lines().find_map(|line| line.strip_prefix("max ")).unwrap_or(&text);
        line.trim().parse().unwrap_or(0)
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        // A group goes once nobody is in it.
        if let Some(above) = self.dir.parent() {
            drop(std::fs::write(above.join("cgroup.procs"), std::process::id().to_string()));
        }
        drop(std::fs::remove_dir(&self.dir));
    }
}

/// A file of so many bytes that are really there.
pub fn fill(path: &Path, bytes: u64) -> std::io::Result<()> {
    let file = File::options().write(true).create(true).truncate(true).open(path)?;
    // SAFETY: no memory is involved.
    match unsafe { libc::posix_fallocate(file.as_raw_fd(), 0, bytes as i64) } {
        0 => Ok(()),
        number => Err(std::io::Error::from_raw_os_error(number)),
    }
}
