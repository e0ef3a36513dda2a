//! The thread that serves the control socket.

use crate::base::clock::Clock;
use crate::base::status::Result;
use crate::io::socket::{Listener, Waker, Watched, wait};
use crate::store::control::connection::Connection;

/// Most clients at once.
pub const MAX_CONNECTIONS: usize = 8;
/// Pause after a failed accept, which means that descriptors are scarce.
const PAUSE_NS: u64 = 1_000_000_000;
const MS: u64 = 1_000_000;

/// Serves clients until the bell rings. The listener removes its path when it is dropped.
pub fn serve(listener: &Listener, waker: &Waker, answer: &mut dyn FnMut(&str) -> Result<String>) {
    let clock = Clock::real();
    let mut clients: Vec<Connection> = Vec::new();
    let mut paused_until_ns = 0;
    loop {
        let now_ns = clock.now_ns();
        clients.retain(|client| client.until_ns > now_ns);
        let is_paused = paused_until_ns > now_ns;
        let mut watched: Vec<Watched> = vec![waker.watched()];
        watched.extend(clients.iter().map(Connection::watched));
        if !is_paused {
            watched.push(listener.watched());
        }
        let pause = is_paused.then_some(paused_until_ns);
        let next_ns = clients.iter().map(|client| client.until_ns).chain(pause).min();
        let timeout_ms = match next_ns {
            Some(_) if clients.iter().any(Connection::has_more) => 0,
            Some(until_ns) => ((until_ns - now_ns) / MS + 1).min(60_000) as i32,
            None => -1,
        };
        if let Err(error) = wait(&mut watched, timeout_ms) {
            log::error!("the control socket is closed after an error: {error}");
            return;
        }
        if watched[0].ready {
            return;
        }
        let mut ready = watched[1..].iter().map(|one| one.ready);
        let now_ns = clock.now_ns();
        clients.retain_mut(|client| {
            let is_ready = ready.next().unwrap_or(false) || client.has_more();
            !is_ready || client.proceed(now_ns, answer)
        });
        if !is_paused && watched.last().is_some_and(|one| one.ready) {
            match listener.accept() {
                Ok(Some(stream)) if clients.len() < MAX_CONNECTIONS => {
                    clients.push(Connection::new(stream, now_ns));
                }
                Ok(Some(stream)) => Connection::reject(&stream),
                Ok(None) => {}
                Err(error) => {
                    log::warn!("the control socket: {error}");
                    paused_until_ns = now_ns.saturating_add(PAUSE_NS);
                }
            }
        }
    }
}
