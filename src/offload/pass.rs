//! A pass over all layers in order. Layers are prefetched, as many as there are buffers, if no
//! policy selects their blocks or if an earlier layer's query selects them.

use crate::attention::Rows;
use crate::base::status::{Result, Status};
use crate::fail;
use crate::offload::Offload;
use crate::offload::load::{BlockSelection, Loaded};
use crate::sparse::{Context, caps};

/// A pass in progress.
#[derive(Clone, Copy, Debug)]
pub(super) struct Pass {
    context: Context,
    /// The layer to be taken next, and the first layer whose load has not begun.
    next: u32,
    begun: u32,
    /// The engine uses a layer.
    is_taken: bool,
}

impl Offload {
    /// Begins a pass: the first layers are being loaded. Earlier loads are canceled.
    pub fn begin(&mut self, context: &Context) -> Result<()> {
        for buffer in 0..self.ring.len() {
            self.done(buffer)?;
        }
        self.pass = Some(Pass { context: *context, next: 0, begun: 0, is_taken: false });
        self.load_ahead();
        Ok(())
    }

    /// Waits for the next layer. Returns its buffer. A policy that selects blocks needs the
    /// layer's query; such a load begins only now. New tokens of the layer must be put before.
    pub fn take(&mut self, layer: u32, query: Option<&Rows<'_>>) -> Result<(u32, Loaded)> {
        let pass = match self.pass {
            Some(pass) if pass.next == layer && !pass.is_taken => pass,
            Some(pass) if pass.is_taken => {
                fail!(State, "layer {} was not given back: do that first", pass.next)
            }
            Some(pass) => fail!(
                State,
                "layer {layer} is out of order: the next of this pass is {}",
                pass.next
            ),
            None => fail!(State, "no pass has begun: call begin first"),
        };
        let buffer = layer % self.ring.len();
        let mut waited = Err(Status::State.into());
        let slot = self.ring.get(buffer)?;
        if pass.begun > layer && slot.layer == layer && slot.has_tail {
            waited = self.wait(buffer);
        }
        // The load has not begun, the tail became a block since, or the engine used the buffer
        // otherwise.
        if waited.as_ref().is_err_and(|error| error.status() == Status::State) {
            self.load(buffer, layer, BlockSelection::All, query, &pass.context)?;
            waited = self.wait(buffer);
        }
        let loaded = waited?;
        if let Some(query) = query {
            self.audit_ahead(buffer, query, &pass.context);
        }
        if let Some(pass) = &mut self.pass {
            (pass.begun, pass.is_taken) = (pass.begun.max(layer + 1), true);
        }
        self.load_with_query(layer, query)?;
        Ok((buffer, loaded))
    }

    /// Gives back the layer that the engine has used. Its buffer is used for prefetching.
    pub fn give_back(&mut self, layer: u32) -> Result<()> {
        match &mut self.pass {
            Some(pass) if pass.is_taken && pass.next == layer => {
                (pass.next, pass.is_taken) = (layer + 1, false);
            }
            _ => fail!(State, "layer {layer} is not taken"),
        }
        self.done(layer % self.ring.len())?;
        self.load_ahead();
        Ok(())
    }

    /// Begins loads that need no query, as far as buffers are free. A failed one begins again when
    /// the layer is taken, and reports its error there.
    fn load_ahead(&mut self) {
        while let Some(pass) = self.pass {
            let layer = pass.begun;
            let is_last = layer >= self.geometry.shape.layers;
            if is_last || layer >= pass.next + self.ring.len() || self.selects(layer) {
                return;
            }
            let buffer = layer % self.ring.len();
            if self.load(buffer, layer, BlockSelection::All, None, &pass.context).is_err() {
                return;
            }
            self.pass = Some(Pass { begun: layer + 1, ..pass });
        }
    }

    /// Begins to load a later layer with this layer's query, if the policy selects that way.
    fn load_with_query(&mut self, layer: u32, query: Option<&Rows<'_>>) -> Result<()> {
        let (Some(pass), Some(query)) = (self.pass, query) else { return Ok(()) };
        let policy = self.policies.of(pass.context.is_prefill);
        let ahead = policy.map_or(0, |policy| policy.traits().ahead);
        let after = pass.begun;
        let is_its = ahead > 0 && after == layer + ahead && ahead < self.ring.len();
        if !is_its || after >= self.geometry.shape.layers {
            return Ok(());
        }
        let buffer = after % self.ring.len();
        if self.load(buffer, after, BlockSelection::All, Some(query), &pass.context).is_ok() {
            self.pass = Some(Pass { begun: after + 1, ..pass });
        }
        Ok(())
    }

    /// Whether a policy selects blocks of a layer by its query.
    fn selects(&mut self, layer: u32) -> bool {
        let Some(pass) = self.pass else { return false };
        let is_prefill = pass.context.is_prefill;
        let cap = if is_prefill { caps::LOAD_PREFILL } else { caps::LOAD_DECODE };
        self.policies.of(is_prefill).is_some_and(|policy| {
            let traits = policy.traits();
            traits.caps & cap != 0 && layer >= traits.dense_layers
        })
    }
}
