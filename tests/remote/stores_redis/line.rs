//! Lossy links between hosts. Hosts are network namespaces that are joined by veth. The kernel
//! drops and delays packets as far as it has the modules for it. If it cannot delay them, a relay
//! in this process does, and cuts connections.

use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::os::unix::process::CommandExt;
use std::process::Command;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::spawn;
use std::time::Duration;

/// Reason why this host does not support lossy links.
pub type Lack = String;

/// Delay in each direction.
const DELAY: Duration = Duration::from_millis(3);
/// Lost packets of every 1000, in each direction.
const LOST: u32 = 10;

/// Moves the calling thread to a new network namespace. Its later children inherit that.
pub fn own_network() -> std::io::Result<()> {
    // SAFETY: the call takes an integer only.
    match unsafe { libc::unshare(libc::CLONE_NEWNET) } {
        0 => Ok(()),
        _ => Err(std::io::Error::last_os_error()),
    }
}

/// Runs a program in the network namespace of a process. Returns its output.
fn run(pid: Option<u32>, line: &str) -> Result<String, Lack> {
    let mut words = line.split(' ');
    let mut command = Command::new(words.next().unwrap_or_default());
    command.args(words);
    if let Some(pid) = pid {
        let file = std::fs::File::open(format!("/proc/{pid}/ns/net"));
        let file = file.map_err(|error| format!("{line}: {error}"))?;
        let enter = move || {
            // SAFETY: the call takes the descriptor of an open file.
            match unsafe { libc::setns(std::os::fd::AsRawFd::as_raw_fd(&file), libc::CLONE_NEWNET) }
            {
                0 => Ok(()),
                _ => Err(std::io::Error::last_os_error()),
            }
        };
        // SAFETY: the function makes one system call and nothing else.
        unsafe { command.pre_exec(enter) };
    }
    let out = command.output().map_err(|error| format!("{line}: {error}"))?;
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).trim().to_string();
    match out.status.success() {
        true => Ok(text(&out.stdout)),
        false => Err(format!("{line}: {}", text(&out.stderr))),
    }
}

/// Moves the calling thread to a new network namespace, and checks that this host supports lossy
/// links. Returns whether the kernel delays packets.
fn leave() -> Result<bool, Lack> {
    own_network().map_err(|error| format!("unshare: {error}"))?;
    run(None, "ip link set lo up")?;
    run(None, "ip link add trial type veth peer name other")?;
    let is_held_up = spoil(None, "trial")?;
    run(None, "ip link del trial")?;
    Ok(is_held_up)
}

/// Makes a device lose packets, and delay them if the kernel can. Returns whether it can.
fn spoil(pid: Option<u32>, device: &str) -> Result<bool, Lack> {
    let netem = format!("netem delay {}ms 1ms loss {}%", DELAY.as_millis(), LOST / 10);
    if run(pid, &format!("tc qdisc add dev {device} root {netem}")).is_ok() {
        return Ok(true);
    }
    // Packets that exceed a short queue are lost, and so are some others at random.
    let tbf = "tbf rate 200mbit burst 64kb latency 20ms";
    run(pid, &format!("tc qdisc add dev {device} root {tbf}"))?;
    let table = format!("ip {device}");
    run(pid, &format!("nft add table {table}"))?;
    let hook = "{ type filter hook input priority 0 ; }";
    run(pid, &format!("nft add chain {table} in {hook}"))?;
    let some = format!("numgen random mod 1000 < {LOST} counter drop");
    run(pid, &format!("nft add rule {table} in iifname {device} {some}"))?;
    Ok(false)
}

/// A lossy link between the host of the calling thread and that of a process.
pub struct Line {
    number: usize,
    pid: u32,
}

impl Line {
    /// Moves the calling thread and its later children to a new host, where all links begin.
    /// Returns whether the kernel delays packets.
    pub fn begin() -> Result<bool, Lack> {
        // A thread cannot return to its old namespace: another thread tries first.
        std::thread::spawn(leave).join().expect("it ended")?;
        leave()
    }

    /// Makes a link to the host of a process.
    pub fn join(number: usize, pid: u32) -> Result<Line, Lack> {
        let near = format!("near{number}");
        run(None, &format!("ip link add {near} type veth peer name far netns {pid}"))?;
        run(None, &format!("ip addr add 10.77.{number}.1/24 dev {near}"))?;
        run(None, &format!("ip link set {near} up"))?;
        run(Some(pid), "ip link set lo up")?;
        run(Some(pid), &format!("ip addr add 10.77.{number}.2/24 dev far"))?;
        run(Some(pid), "ip link set far up")?;
        spoil(None, &near)?;
        spoil(Some(pid), "far")?;
        Ok(Line { number, pid })
    }

    /// Address of this host at the other end of the link.
    pub fn host(&self) -> String {
        format!("10.77.{}.1", self.number)
    }

    /// Number of lost packets.
    pub fn lost(&self) -> u64 {
        let near = format!("near{}", self.number);
        let of = |pid, device: &str| {
            let queue = run(pid, &format!("tc -s qdisc show dev {device}")).unwrap_or_default();
            let wall = run(pid, &format!("nft list table ip {device}")).unwrap_or_default();
            after(&queue, "(dropped ") + after(&wall, "counter packets ")
        };
        of(None, &near) + of(Some(self.pid), "far")
    }

    /// Sets the link up or down.
    pub fn set(&self, is_up: bool) {
        let state = if is_up { "up" } else { "down" };
        run(None, &format!("ip link set near{} {state}", self.number)).expect("a device of ours");
    }
}

fn after(text: &str, what: &str) -> u64 {
    let rest = text.split_once(what).map_or("", |(_, rest)| rest);
    let digits = rest.find(|c: char| !c.is_ascii_digit()).unwrap_or(rest.len());
    rest[..digits].parse().unwrap_or(0)
}

/// Relay in front of a server. It delays all bytes, and can cut connections.
pub struct Relay {
    pub port: u16,
    shared: Arc<Shared>,
}

struct Shared {
    to: u16,
    open: Mutex<Vec<TcpStream>>,
    passed: AtomicU64,
    is_over: AtomicBool,
}

impl Relay {
    /// Starts a relay on the host of the calling thread.
    pub fn start(to: u16) -> Relay {
        let listener = TcpListener::bind("0.0.0.0:0").expect("a port");
        let port = listener.local_addr().expect("bound").port();
        let (open, passed, is_over) = (Mutex::default(), AtomicU64::new(0), AtomicBool::new(false));
        let shared = Arc::new(Shared { to, open, passed, is_over });
        spawn({
            let shared = shared.clone();
            move || {
                let streams = listener.incoming().map_while(Result::ok);
                streams
                    .take_while(|_| !shared.is_over.load(Ordering::Relaxed))
                    .for_each(|near| shared.serve(near));
            }
        });
        Relay { port, shared }
    }

    /// Cuts all connections, also in the middle of a message. Returns their number.
    pub fn cut(&self) -> usize {
        let open = std::mem::take(&mut *self.shared.open.lock().expect("whole"));
        open.iter().filter(|stream| stream.shutdown(Shutdown::Both).is_ok()).count()
    }

    /// Bytes that passed the relay.
    pub fn passed(&self) -> u64 {
        self.shared.passed.load(Ordering::Relaxed)
    }
}

impl Drop for Relay {
    fn drop(&mut self) {
        self.shared.is_over.store(true, Ordering::Relaxed);
        self.cut();
        // The relay checks `is_over` when it accepts the next connection.
        let _ = TcpStream::connect(("127.0.0.1", self.port));
    }
}

impl Shared {
    fn serve(self: &Arc<Shared>, near: TcpStream) {
        let Ok(far) = TcpStream::connect(("127.0.0.1", self.to)) else { return };
        let twice = |stream: &TcpStream| {
            stream.set_nodelay(true).expect("set");
            stream.try_clone().expect("a handle")
        };
        let (near_too, far_too) = (twice(&near), twice(&far));
        self.open.lock().expect("whole").extend([twice(&near), twice(&far)]);
        for (from, to) in [(near, far), (far_too, near_too)] {
            let shared = self.clone();
            spawn(move || shared.pass(from, to));
        }
    }

    fn pass(&self, mut from: TcpStream, mut to: TcpStream) {
        let mut bytes = vec![0; 256 << 10];
        while let Ok(count @ 1..) = from.read(&mut bytes) {
            std::thread::sleep(DELAY);
            if to.write_all(&bytes[..count]).is_err() {
                break;
            }
            self.passed.fetch_add(count as u64, Ordering::Relaxed);
        }
        let _ = (to.shutdown(Shutdown::Both), from.shutdown(Shutdown::Both));
    }
}
