//! Memory of peer devices. With peer access it is used like the device's own, by copies and
//! kernels. Without access there is one driver call, for a run at a time; copies between such
//! memory and the host are staged in this device's memory. Nothing else is documented to work
//! without access.

use std::ffi::c_int;

use crate::base::status::{Error, Result};
use crate::device::cuda::abi::{Handle, Ordinal, POINTER_ACCESS, POINTER_READ_WRITE, code};
use crate::device::cuda::copies::{Run, run_of, runs_of};
use crate::device::cuda::{Cuda, Inner};
use crate::device::{Copy, Direction, Memory};
use crate::fail;

/// A peer device.
pub struct Peer {
    pub ordinal: Ordinal,
    /// The shared context of the peer.
    context: usize,
    /// Why its memory is not accessible, if it is not.
    pub no_access: Option<Error>,
}

/// Owner of memory that a copy names.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum MemoryOwner {
    /// This device, or shared by all.
    #[default]
    Own,
    /// The peer at an index, with access.
    Peer(usize),
    /// The peer at an index, without access.
    PeerNoAccess(usize),
}

impl MemoryOwner {
    pub fn lacks_access(self) -> bool {
        matches!(self, MemoryOwner::PeerNoAccess(_))
    }
}

/// A copy of a batch that names memory without access.
#[derive(Clone, Copy)]
pub struct PeerCopy {
    /// Index of the copy.
    pub copy: usize,
    pub tensor: MemoryOwner,
    pub plane: MemoryOwner,
}

impl PeerCopy {
    /// The entry of a copy, if it has one; entries are sorted.
    pub fn find(all: &[PeerCopy], copy: usize) -> Option<&PeerCopy> {
        let at = all.binary_search_by_key(&copy, |no_access| no_access.copy).ok()?;
        all.get(at)
    }
}

impl Cuda {
    /// Enables access to peers as far as possible. Access stays enabled when this device is closed,
    /// since others may rely on it.
    pub(super) fn open_peers(&mut self, places: &[u32], count: c_int) -> Result<()> {
        for place in places {
            let found = c_int::try_from(*place).ok().filter(|place| *place < count);
            let Some(found) = found else {
                fail!(Invalid, "peer {place}: the driver has {count} devices");
            };
            let ordinal = self.driver.device_at(found)?;
            if ordinal == self.ordinal {
                fail!(Invalid, "device {place} cannot be its own peer");
            }
            if self.peers.iter().any(|peer| peer.ordinal == ordinal) {
                fail!(Invalid, "peer {place} is named twice");
            }
            let context = self.driver.retain(ordinal)?;
            self.peers.push(Peer { ordinal, context, no_access: None });
            let no_access = self.reach(ordinal, context).err();
            if let Some(error) = &no_access {
                log::info!("no access to device {ordinal}'s memory: {}", error.message());
            }
            if let Some(peer) = self.peers.last_mut() {
                peer.no_access = no_access;
            }
        }
        Ok(())
    }

    fn reach(&self, ordinal: Ordinal, context: usize) -> Result<()> {
        let mut can = 0;
        // SAFETY: a place for a number.
        let status = unsafe { (self.driver.can_reach)(&mut can, self.ordinal, ordinal) };
        self.driver.check("cuDeviceCanAccessPeer", status)?;
        if can == 0 {
            fail!(Unsupported, "the devices cannot access each other");
        }
        let _guard = self.enter()?;
        // SAFETY: a retained context; flags must be 0.
        match unsafe { (self.driver.reach)(context as Handle, 0) } {
            code::ALREADY_REACHED => Ok(()),
            other => self.driver.check("cuCtxEnablePeerAccess", other),
        }
    }

    /// Owner of a peer's memory, or none if the device is no peer. Access is queried for each
    /// allocation: mapped and pooled memory has its own.
    pub(super) fn owner(&self, address: u64, ordinal: Ordinal) -> Result<Option<MemoryOwner>> {
        let Some(peer) = self.peers.iter().position(|peer| peer.ordinal == ordinal) else {
            return Ok(None);
        };
        let mut access: u32 = 0;
        let (attributes, answer) = ([POINTER_ACCESS], [(&raw mut access).cast()]);
        // SAFETY: one question, and a place for its answer.
        let code = unsafe {
            (self.driver.pointer_attributes)(1, attributes.as_ptr(), answer.as_ptr(), address)
        };
        self.driver.check("cuPointerGetAttributes", code)?;
        let is_reached = access == POINTER_READ_WRITE;
        Ok(Some(if is_reached { MemoryOwner::Peer(peer) } else { MemoryOwner::PeerNoAccess(peer) }))
    }

    fn context_of(&self, owner: MemoryOwner) -> Handle {
        let peer = match owner {
            MemoryOwner::Own => None,
            MemoryOwner::Peer(peer) | MemoryOwner::PeerNoAccess(peer) => self.peers.get(peer),
        };
        peer.map_or(self.context, |peer| peer.context) as Handle
    }

    /// Issues a copy of memory without access on one side or both.
    ///
    /// # Safety
    /// As for [`Cuda::issue`].
    pub(super) unsafe fn issue_peer_copy(
        &self,
        inner: &mut Inner,
        (copy, no_access): (&Copy<'_>, &PeerCopy),
        (queue, stream): (usize, Handle),
        begun: &mut bool,
    ) -> Result<()> {
        let (from, to) = match copy.direction {
            Direction::Gather => (no_access.tensor, no_access.plane),
            Direction::Scatter => (no_access.plane, no_access.tensor),
        };
        let contexts = (self.context_of(from), self.context_of(to));
        for strip in copy.tensor.strips() {
            let (count, bytes) = runs_of(&strip);
            for row in 0..count {
                let run = run_of(copy, &strip, row, bytes);
                // SAFETY: the caller's promise: a run of a strip.
                unsafe { self.issue_peer_run(inner, &run, contexts, (queue, stream), begun)? };
            }
        }
        Ok(())
    }

    /// # Safety
    /// As for [`Cuda::issue`].
    unsafe fn issue_peer_run(
        &self,
        inner: &mut Inner,
        run: &Run,
        (from, to): (Handle, Handle),
        (queue, stream): (usize, Handle),
        begun: &mut bool,
    ) -> Result<()> {
        let own = self.context as Handle;
        let between = |run: &Run, from: Handle, to: Handle| {
            // SAFETY: the caller's promise, and retained contexts.
            let code = unsafe {
                (self.driver.between_devices)(run.to, to, run.from, from, run.bytes, stream)
            };
            self.driver.check("cuMemcpyPeerAsync", code)
        };
        if [run.from_memory, run.to_memory] == [Memory::Device; 2] {
            between(run, from, to)?;
            *begun = true;
            return Ok(());
        }
        // Work of a stream is in order, and so is the use of its staging memory.
        let stage = self.stage(&mut inner.sums, queue, 1)?;
        let mut done = 0;
        while done < run.bytes {
            let bytes = (run.bytes - done).min(stage.bytes as usize);
            let on_way = Memory::Device;
            let first = Run {
                to: stage.address,
                from: run.from + done as u64,
                bytes,
                to_memory: on_way,
                ..*run
            };
            let then = Run {
                to: run.to + done as u64,
                from: stage.address,
                bytes,
                from_memory: on_way,
                ..*run
            };
            *begun = true;
            if run.from_memory == Memory::Host {
                // SAFETY: the caller's promise, and staging memory of this stream.
                unsafe { self.issue_run(&first, stream)? };
                between(&then, own, to)?;
            } else {
                between(&first, from, own)?;
                // SAFETY: as above.
                unsafe { self.issue_run(&then, stream)? };
            }
            done += bytes;
        }
        Ok(())
    }

    /// Releases the peers' contexts.
    pub(super) fn release_peers(&mut self) {
        for peer in self.peers.drain(..) {
            // SAFETY: retained once.
            let code = unsafe { (self.driver.release_primary)(peer.ordinal) };
            self.driver.note("cuDevicePrimaryCtxRelease", code);
        }
    }
}
