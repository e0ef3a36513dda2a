//! TCP connections. Only [`Watch::wait`] waits, until a deadline. Bytes are sent from and received
//! into pieces of memory, without copies.

use std::net::{IpAddr, SocketAddr, ToSocketAddrs};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

use crate::base::clock::Clock;
use crate::io::errno::{self, uninterrupted};

/// Limit: pieces of a call.
pub const MAX_PIECES: usize = 64;
/// Limit: addresses of a name that are tried.
pub const MAX_ADDRESSES: usize = 8;
/// TCP keepalive: idle seconds before the first probe, seconds between probes, number of probes.
const KEEP_IDLE_S: i32 = 30;
const KEEP_TURN_S: i32 = 10;
const KEEP_TURNS: i32 = 3;

/// Why a connection cannot be used any more.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Lost {
    /// The deadline passed.
    Late,
    /// It ended or was never established: a system error number; 0 = closed by the peer.
    Gone(i32),
    /// The peer cannot be authenticated, or the connection is not private: the reason, and what to
    /// do.
    Unsafe(String),
}

/// Pieces of memory in order.
pub struct Pieces {
    table: [libc::iovec; MAX_PIECES],
    count: usize,
}

/// A connection, established or in progress.
pub struct Link(OwnedFd);

/// Connections to wait for.
#[derive(Default)]
pub struct Watch(Vec<libc::pollfd>);

impl Default for Pieces {
    fn default() -> Pieces {
        let none = libc::iovec { iov_base: std::ptr::null_mut(), iov_len: 0 };
        Pieces { table: [none; MAX_PIECES], count: 0 }
    }
}

impl Pieces {
    /// Adds a piece; false = no room for it.
    pub fn push(&mut self, address: *mut u8, bytes: usize) -> bool {
        let Some(slot) = self.table.get_mut(self.count) else { return false };
        *slot = libc::iovec { iov_base: address.cast(), iov_len: bytes };
        self.count += 1;
        true
    }

    /// Removes all pieces.
    pub fn clear(&mut self) {
        self.count = 0;
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.count == 0
    }

    /// Address and length of each piece.
    pub fn each(&self) -> impl Iterator<Item = (*mut u8, usize)> + '_ {
        self.table[..self.count].iter().map(|piece| (piece.iov_base.cast(), piece.iov_len))
    }

    fn message(&mut self) -> libc::msghdr {
        // SAFETY: integers and pointers only, which may be zero.
        let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
        message.msg_iov = self.table.as_mut_ptr();
        // The type of this field differs between systems.
        message.msg_iovlen = self.count as _;
        message
    }
}

impl Link {
    /// Begins to connect; [`Link::made`] returns the result, once the connection is writable.
    pub fn begin(to: &SocketAddr) -> Result<Link, Lost> {
        let family = if to.is_ipv4() { libc::AF_INET } else { libc::AF_INET6 };
        let kind = libc::SOCK_STREAM | libc::SOCK_NONBLOCK | libc::SOCK_CLOEXEC;
        // SAFETY: no memory is involved.
        let fd = match unsafe { libc::socket(family, kind, 0) } {
            -1 => return Err(Lost::Gone(errno::last_number())),
            // SAFETY: a descriptor this call has just created and nothing else owns.
            fd => unsafe { OwnedFd::from_raw_fd(fd) },
        };
        let link = Link(fd);
        // Best effort. Without these options requests wait for each other's packets, and a dead
        // peer is noticed only at a deadline.
        for (level, name, value) in [
            (libc::IPPROTO_TCP, libc::TCP_NODELAY, 1),
            (libc::SOL_SOCKET, libc::SO_KEEPALIVE, 1),
            (libc::IPPROTO_TCP, libc::TCP_KEEPIDLE, KEEP_IDLE_S),
            (libc::IPPROTO_TCP, libc::TCP_KEEPINTVL, KEEP_TURN_S),
            (libc::IPPROTO_TCP, libc::TCP_KEEPCNT, KEEP_TURNS),
        ] {
            link.set(level, name, value);
        }
        match connect(link.0.as_raw_fd(), to) {
            Ok(()) | Err(libc::EINPROGRESS | libc::EINTR) => Ok(link),
            Err(number) => Err(Lost::Gone(number)),
        }
    }

    /// The result of connecting. Call it only after a wait for room to write.
    pub fn made(&self) -> Result<(), Lost> {
        let (mut number, mut bytes) = (0i32, size_of::<i32>() as libc::socklen_t);
        let (fd, at) = (self.0.as_raw_fd(), (&raw mut number).cast());
        // SAFETY: an open descriptor, and an integer of the stated length.
        let rc =
            unsafe { libc::getsockopt(fd, libc::SOL_SOCKET, libc::SO_ERROR, at, &raw mut bytes) };
        match (rc, number) {
            (0, 0) => Ok(()),
            (0, number) => Err(Lost::Gone(number)),
            _ => Err(Lost::Gone(errno::last_number())),
        }
    }

    /// Round-trip time, if the kernel knows it.
    pub fn round_trip_ns(&self) -> Option<u64> {
        // SAFETY: integers only, which may be zero.
        let mut info: libc::tcp_info = unsafe { std::mem::zeroed() };
        let mut bytes = size_of_val(&info) as libc::socklen_t;
        let (fd, at) = (self.0.as_raw_fd(), (&raw mut info).cast());
        // SAFETY: an open descriptor; `info` has the stated length, and a kernel with a shorter
        // struct writes less.
        let rc =
            unsafe { libc::getsockopt(fd, libc::IPPROTO_TCP, libc::TCP_INFO, at, &raw mut bytes) };
        (rc == 0 && info.tcpi_rtt > 0).then(|| u64::from(info.tcpi_rtt) * 1000)
    }

    /// Sends as much as there is room for now; None = no room.
    ///
    /// # Safety
    /// Every piece can be read.
    pub unsafe fn send(&self, pieces: &mut Pieces) -> Result<Option<usize>, Lost> {
        let (fd, message) = (self.0.as_raw_fd(), pieces.message());
        // SAFETY: an open descriptor, and a table that lives meanwhile; the caller guarantees the
        // pieces.
        passed(uninterrupted(|| unsafe {
            libc::sendmsg(fd, &raw const message, libc::MSG_NOSIGNAL)
        }))
    }

    /// Receives what has arrived, as far as the pieces have room; None = nothing has. The end of
    /// the stream is [`Lost::Gone`].
    ///
    /// # Safety
    /// Every piece can be written, and nothing else accesses it meanwhile.
    pub unsafe fn receive(&self, pieces: &mut Pieces) -> Result<Option<usize>, Lost> {
        let (fd, mut message) = (self.0.as_raw_fd(), pieces.message());
        // SAFETY: an open descriptor, and a table that lives meanwhile; the caller guarantees the
        // pieces.
        match passed(uninterrupted(|| unsafe { libc::recvmsg(fd, &raw mut message, 0) })) {
            Ok(Some(0)) => Err(Lost::Gone(0)),
            other => other,
        }
    }

    fn set(&self, level: i32, name: i32, value: i32) {
        let (fd, at) = (self.0.as_raw_fd(), (&raw const value).cast());
        // SAFETY: an open descriptor, and an integer of the stated length.
        unsafe { libc::setsockopt(fd, level, name, at, size_of::<i32>() as libc::socklen_t) };
    }
}

impl Watch {
    /// Removes all connections.
    pub fn clear(&mut self) {
        self.0.clear();
    }

    /// Adds a connection to wait for data, for room to send, or for both.
    pub fn add(&mut self, link: &Link, to_read: bool, to_write: bool) {
        let mut events = 0;
        events |= if to_read { libc::POLLIN } else { 0 };
        events |= if to_write { libc::POLLOUT } else { 0 };
        self.0.push(libc::pollfd { fd: link.0.as_raw_fd(), events, revents: 0 });
    }

    /// Waits until one connection is ready. Without connections it only sleeps.
    pub fn wait(&mut self, clock: &Clock, deadline_ns: u64) -> Result<(), Lost> {
        let left = deadline_ns.saturating_sub(clock.now_ns());
        if left == 0 {
            return Err(Lost::Late);
        }
        let wait = libc::timespec {
            tv_sec: libc::time_t::try_from(left / 1_000_000_000).unwrap_or(libc::time_t::MAX),
            tv_nsec: (left % 1_000_000_000) as _,
        };
        let (at, count) = (self.0.as_mut_ptr(), self.0.len() as libc::nfds_t);
        // SAFETY: as many pollfds as stated; no signal mask.
        match unsafe { libc::ppoll(at, count, &raw const wait, std::ptr::null()) } {
            0 => Err(Lost::Late),
            ready if ready > 0 => Ok(()),
            _ => match errno::last_number() {
                // The caller checks again.
                libc::EINTR => Ok(()),
                number => Err(Lost::Gone(number)),
            },
        }
    }

    /// Whether connection number `at` can be read, and written. An ended connection reports both,
    /// so that the caller notices.
    pub fn ready(&self, at: usize) -> (bool, bool) {
        let has = |events| self.0.get(at).is_some_and(|polled| polled.revents & events != 0);
        let ended = has(libc::POLLERR | libc::POLLHUP | libc::POLLNVAL);
        (ended || has(libc::POLLIN), ended || has(libc::POLLOUT))
    }
}

/// Resolves a host name; blocks as long as the system's resolver. Literal addresses are not looked
/// up.
pub fn resolve(host: &str, port: u16) -> Result<Vec<SocketAddr>, String> {
    if let Ok(address) = host.parse::<IpAddr>() {
        return Ok(vec![SocketAddr::new(address, port)]);
    }
    match (host, port).to_socket_addrs() {
        Ok(found) => Ok(found.take(MAX_ADDRESSES).collect()),
        Err(error) => Err(format!("resolving {host}: {error}")),
    }
}

impl std::fmt::Display for Lost {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Lost::Late => f.write_str("no answer in time"),
            Lost::Gone(0) => f.write_str("the peer closed the connection"),
            Lost::Gone(number) => write!(f, "{}", std::io::Error::from_raw_os_error(*number)),
            Lost::Unsafe(why) => f.write_str(why),
        }
    }
}

fn passed(done: Result<isize, i32>) -> Result<Option<usize>, Lost> {
    match done {
        Ok(bytes) => Ok(Some(usize::try_from(bytes).unwrap_or(0))),
        Err(libc::EAGAIN) => Ok(None),
        Err(number) => Err(Lost::Gone(number)),
    }
}

fn connect(fd: i32, to: &SocketAddr) -> Result<(), i32> {
    let done = match to {
        SocketAddr::V4(to) => {
            // SAFETY: integers only, which may be zero.
            let mut address: libc::sockaddr_in = unsafe { std::mem::zeroed() };
            address.sin_family = libc::AF_INET as libc::sa_family_t;
            address.sin_port = to.port().to_be();
            address.sin_addr.s_addr = u32::from_ne_bytes(to.ip().octets());
            let (at, bytes) = ((&raw const address).cast(), size_of_val(&address));
            // SAFETY: an open descriptor, and a whole address.
            unsafe { libc::connect(fd, at, bytes as libc::socklen_t) }
        }
        SocketAddr::V6(to) => {
            // SAFETY: integers only, which may be zero.
            let mut address: libc::sockaddr_in6 = unsafe { std::mem::zeroed() };
            address.sin6_family = libc::AF_INET6 as libc::sa_family_t;
            address.sin6_port = to.port().to_be();
            address.sin6_addr.s6_addr = to.ip().octets();
            address.sin6_scope_id = to.scope_id();
            let (at, bytes) = ((&raw const address).cast(), size_of_val(&address));
            // SAFETY: an open descriptor, and a whole address.
            unsafe { libc::connect(fd, at, bytes as libc::socklen_t) }
        }
    };
    if done == 0 { Ok(()) } else { Err(errno::last_number()) }
}

#[cfg(all(test, not(feature = "shuttle")))]
mod tests {
    use super::*;
    use std::io::{Read, Write};
    use std::net::TcpListener;

    /// Time limit: a longer wait means a hang on any machine.
    const SOON_NS: u64 = 300_000_000_000;

    fn pair() -> (Link, std::net::TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let link = Link::begin(&listener.local_addr().unwrap()).unwrap();
        let other = listener.accept().unwrap().0;
        let (clock, mut watch) = (Clock::real(), Watch::default());
        watch.add(&link, false, true);
        watch.wait(&clock, clock.now_ns() + SOON_NS).unwrap();
        assert!(watch.ready(0).1);
        link.made().unwrap();
        (link, other)
    }

    #[test]
    fn pieces_are_sent_and_received_in_order() {
        let (link, mut other) = pair();
        let (mut a, mut b) = (*b"abc", *b"defg");
        let mut pieces = Pieces::default();
        assert!(pieces.is_empty());
        assert!(pieces.push(a.as_mut_ptr(), 3) && pieces.push(b.as_mut_ptr(), 4));
        // SAFETY: both buffers live.
        assert_eq!(unsafe { link.send(&mut pieces) }, Ok(Some(7)));
        let mut got = [0; 7];
        other.read_exact(&mut got).unwrap();
        assert_eq!(&got, b"abcdefg");
        assert!(link.round_trip_ns().is_some_and(|ns| (1..SOON_NS).contains(&ns)));
        // SAFETY: both buffers live.
        assert_eq!(unsafe { link.receive(&mut pieces) }, Ok(None));
        other.write_all(b"1234567").unwrap();
        let (clock, mut watch) = (Clock::real(), Watch::default());
        watch.add(&link, true, false);
        watch.wait(&clock, clock.now_ns() + SOON_NS).unwrap();
        assert_eq!(watch.ready(0), (true, false));
        // SAFETY: both buffers live.
        assert_eq!(unsafe { link.receive(&mut pieces) }, Ok(Some(7)));
        assert_eq!((&a, &b), (b"123", b"4567"));
        drop(other);
        watch.wait(&clock, clock.now_ns() + SOON_NS).unwrap();
        // SAFETY: both buffers live.
        assert_eq!(unsafe { link.receive(&mut pieces) }, Err(Lost::Gone(0)));
        for n in 2..MAX_PIECES {
            assert!(pieces.push(a.as_mut_ptr(), 1), "{n}");
        }
        assert!(!pieces.push(a.as_mut_ptr(), 1));
    }

    #[test]
    fn a_wait_ends_at_its_deadline() {
        let (link, other) = pair();
        let (clock, mut watch) = (Clock::real(), Watch::default());
        watch.add(&link, true, false);
        let before = clock.now_ns();
        assert_eq!(watch.wait(&clock, before + 20_000_000), Err(Lost::Late));
        let took = clock.now_ns() - before;
        // Nothing else ends it: without its deadline it would hang.
        assert!((20_000_000..SOON_NS).contains(&took), "{took}");
        assert_eq!(watch.wait(&clock, before), Err(Lost::Late));
        drop(other);
    }

    #[test]
    fn refused_connection_is_an_error() {
        let at = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
        let (clock, mut watch) = (Clock::real(), Watch::default());
        let rc = Link::begin(&at).and_then(|link| {
            watch.add(&link, false, true);
            watch.wait(&clock, clock.now_ns() + SOON_NS)?;
            link.made()
        });
        assert_eq!(rc, Err(Lost::Gone(libc::ECONNREFUSED)));
        assert!(Lost::Gone(libc::ECONNREFUSED).to_string().contains("refused"));
    }

    #[test]
    fn literal_addresses_are_not_resolved() {
        assert_eq!(resolve("127.0.0.1", 7).unwrap(), ["127.0.0.1:7".parse().unwrap()]);
        assert_eq!(resolve("::1", 7).unwrap(), ["[::1]:7".parse().unwrap()]);
        assert!(resolve("no such host", 7).is_err());
    }
}
