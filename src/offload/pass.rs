//! A pass over all layers in their order. Layers whose blocks nobody has to select, or whose
//! selection has a query before its own, are loaded ahead: as many as there are buffers.

use crate::attention::Rows;
use crate::base::status::{Result, Status};
use crate::fail;
use crate::offload::Offload;
use crate::offload::load::{Loaded, Which};
use crate::sparse::{Context, caps};

/// A pass under way.
#[derive(Clone, Copy, Debug)]
pub(super) struct Pass {
    context: Context,
    /// The layer that is taken next, and the first whose load was not begun.
    next: u32,
    begun: u32,
    /// The engine has one.
    is_taken: bool,
}

impl Offload {
    /// Begins a pass: the first layers are on their way. What was loaded before is given up.
    pub fn begin(&mut self, context: &Context) -> Result<()> {
        for buffer in 0..self.ring.len() {
            self.done(buffer)?;
        }
        self.pass = Some(Pass { context: *context, next: 0, begun: 0, is_taken: false });
        self.load_ahead();
        Ok(())
    }

    /// The buffer with the blocks of the next layer, which is waited for. Its query is asked
    /// for where a policy selects; nothing that is selected by it can be there before. The
    /// new tokens of this layer were put before this.
    pub fn take(&mut self, layer: u32, query: Option<&Rows<'_>>) -> Result<(u32, Loaded)> {
        let pass = match self.pass {
            Some(pass) if pass.next == layer && !pass.is_taken => pass,
            Some(pass) if pass.is_taken => fail!(State, "layer {} was not given back", pass.next),
            Some(pass) => fail!(State, "layer {layer}: the next of this pass is {}", pass.next),
            None => fail!(State, "no pass has begun"),
        };
        let buffer = layer % self.ring.len();
        let mut came = Err(Status::State.into());
        let slot = self.ring.get(buffer)?;
        if pass.begun > layer && slot.layer == layer && slot.has_tail {
            came = self.wait(buffer);
        }
        // It was not begun, or its tail has become a block since, or the engine uses the buffer
        // for something else.
        if came.as_ref().is_err_and(|error| error.status() == Status::State) {
            self.load(buffer, layer, Which::All, query, &pass.context)?;
            came = self.wait(buffer);
        }
        let loaded = came?;
        if let Some(query) = query {
            self.audit_ahead(buffer, query, &pass.context);
        }
        if let Some(pass) = &mut self.pass {
            (pass.begun, pass.is_taken) = (pass.begun.max(layer + 1), true);
        }
        self.load_by(layer, query)?;
        Ok((buffer, loaded))
    }

    /// The engine has computed with the layer that it took: its buffer is free, and used for
    /// one that is loaded ahead.
    pub fn give_back(&mut self, layer: u32) -> Result<()> {
        match &mut self.pass {
            Some(pass) if pass.is_taken && pass.next == layer => {
                (pass.next, pass.is_taken) = (layer + 1, false);
            }
            _ => fail!(State, "layer {layer} was not taken"),
        }
        self.done(layer % self.ring.len())?;
        self.load_ahead();
        Ok(())
    }

    /// Begins loads that need no query, as far as there are buffers. Those that fail are
    /// begun again when they are taken, which then says why.
    fn load_ahead(&mut self) {
        while let Some(pass) = self.pass {
            let layer = pass.begun;
            let is_last = layer >= self.geometry.shape.layers;
            if is_last || layer >= pass.next + self.ring.len() || self.selects(layer) {
                return;
            }
            let buffer = layer % self.ring.len();
            if self.load(buffer, layer, Which::All, None, &pass.context).is_err() {
                return;
            }
            self.pass = Some(Pass { begun: layer + 1, ..pass });
        }
    }

    /// Begins the load of a later layer by this one's query, where a policy selects by earlier
    /// ones.
    fn load_by(&mut self, layer: u32, query: Option<&Rows<'_>>) -> Result<()> {
        let (Some(pass), Some(query)) = (self.pass, query) else { return Ok(()) };
        let policy = self.policies.of(pass.context.is_prefill);
        let ahead = policy.map_or(0, |policy| policy.traits().ahead);
        let after = pass.begun;
        let is_its = ahead > 0 && after == layer + ahead && ahead < self.ring.len();
        if !is_its || after >= self.geometry.shape.layers {
            return Ok(());
        }
        let buffer = after % self.ring.len();
        if self.load(buffer, after, Which::All, Some(query), &pass.context).is_ok() {
            self.pass = Some(Pass { begun: after + 1, ..pass });
        }
        Ok(())
    }

    /// Whether somebody selects blocks of a layer by a query.
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
