//! One store for several processes: what passes between them, and the client's side. The server's side is
//! `store::server`.

pub mod calls;
pub mod client;
pub mod link;
pub mod messages;
pub mod wire;
