//! An engine's tensors in device memory.

use std::sync::Arc;

use kvtier::device::{Copy, Device, DeviceMemory, Event, Memory, Stream, Way};
use kvtier::kv::core::Rectangle;
use kvtier::kv::core::views::{LayerViews, PlaneView, Tokens, Views};

use crate::support::Engine;

/// An engine's tensors in device memory: an image of tensors in host memory.
pub struct Mirror<'a> {
    device: &'a dyn Device,
    pub engine: Engine,
    there: DeviceMemory,
}

impl<'a> Mirror<'a> {
    /// With what the engine has.
    pub fn new(device: &'a dyn Device, engine: Engine) -> Mirror<'a> {
        let there = device.allocate(engine.bytes().len() as u64).expect("room");
        let mirror = Mirror { device, engine, there };
        let bytes = mirror.there.bytes;
        // SAFETY: the engine's memory, which stays until it is forgotten. Where it cannot be
        // pinned copies are slower.
        unsafe { device.know_host(mirror.host(), bytes) }.expect("host memory");
        mirror.copy(Way::Scatter);
        mirror
    }

    fn here(&self) -> u64 {
        self.engine.bytes().as_ptr().expose_provenance() as u64
    }

    fn host(&self) -> *mut u8 {
        std::ptr::with_exposed_provenance_mut(self.here() as usize)
    }

    /// All of it, to the device or from it.
    pub fn copy(&self, way: Way) {
        let event = self.begin(Stream(0), None, way);
        self.device.wait(event, 0).expect("it ends");
        self.device.release(event).expect("it has ended");
    }

    /// The same, behind an event.
    pub fn begin(&self, stream: Stream, after: Option<Event>, way: Way) -> Event {
        let host = self.host();
        let (address, bytes) = (self.there.address, self.there.bytes);
        let copy = Copy::bytes(host, address, bytes, way, Memory::Device).expect("sound");
        // SAFETY: memory of the mirror's, which nobody else uses.
        unsafe { self.device.submit(stream, after, &mut [copy]) }.expect("taken")
    }

    /// What the engine tells a store: the same, elsewhere.
    pub fn whole(&self) -> Rectangle {
        let what = self.engine.whole();
        let moved = |address: u64| address - self.here() + self.there.address;
        let of = |plane: &PlaneView| {
            let place = match &plane.place {
                Tokens::At(address) => Tokens::At(moved(*address)),
                Tokens::Pages { addresses, page_tokens, shift_bytes } => Tokens::Pages {
                    addresses: Arc::new(addresses.iter().map(|page| moved(*page)).collect()),
                    page_tokens: *page_tokens,
                    shift_bytes: *shift_bytes,
                },
            };
            PlaneView { memory: Memory::Device, place, ..plane.clone() }
        };
        let layer =
            |layer: &LayerViews| LayerViews { k: of(&layer.k), v: layer.v.as_ref().map(of) };
        let views = Arc::new(Views(what.views.0.iter().map(layer).collect()));
        Rectangle { views, ..what }
    }
}

impl Drop for Mirror<'_> {
    fn drop(&mut self) {
        // SAFETY: all moves have ended.
        unsafe { self.device.forget_host(self.host()) }.expect("it was told of");
        // SAFETY: the same.
        unsafe { self.device.free(&self.there) }.expect("its own");
    }
}
