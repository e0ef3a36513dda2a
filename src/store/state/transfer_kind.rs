//! What moves do, and when they have ended.

/// What is done with the cells.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TransferKind {
    /// The engine's tensors into the store.
    Put,
    /// The store into the engine's tensors.
    Get,
    /// Into the host tier, for a get to come.
    Prefetch,
}

/// When a put has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Level {
    /// The cells are in memory.
    Ram = 0,
    /// They are written.
    Disk = 1,
    /// They outlive the machine's end.
    Durable = 2,
    /// The remote has said that it has them; here they are in memory.
    Remote = 3,
}

impl Level {
    /// Whether the disk has to have the cells.
    pub fn is_on_disk(self) -> bool {
        matches!(self, Level::Disk | Level::Durable)
    }
}
