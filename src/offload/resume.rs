//! Going on from blocks that are in the store already.

use crate::base::status::{Result, Status};
use crate::fail;
use crate::offload::Offload;
use crate::offload::load::Which;
use crate::offload::saved::wants_keys;
use crate::offload::source::{canonical, part_of, rows_of};
use crate::sparse::Context;

impl Offload {
    /// The sequence goes on from `tokens` tokens, those of whole blocks, as another session
    /// or an earlier life has left them in the store. What policies knew of them comes back as
    /// far as it was kept; of other blocks they are told the keys, which are loaded for that.
    /// Only where nothing was put yet; the session has these tokens. After an error it is as it
    /// was: NOT_FOUND = keys that policies have to see are not in the store.
    pub fn resume(&mut self, tokens: u32) -> Result<()> {
        let block = self.geometry.shape.block_tokens;
        if self.layers.iter().any(|layer| layer.tokens() > 0) {
            fail!(Busy, "it has tokens already");
        }
        if tokens % block != 0 || tokens > self.geometry.shape.max_tokens {
            fail!(Invalid, "{tokens} tokens are not whole blocks of {block}, or too many");
        }
        self.check_known(tokens)?;
        self.layers.iter_mut().for_each(|layer| layer.stored = tokens);
        self.together = tokens;
        let told = (0..self.geometry.shape.layers).try_for_each(|layer| self.tell(layer, tokens));
        if told.is_err() {
            self.layers.iter_mut().for_each(|layer| layer.stored = 0);
            self.together = 0;
            self.policies.all().for_each(|policy| policy.reset());
        }
        self.pay();
        told
    }

    /// Policies come to know the blocks of a layer.
    fn tell(&mut self, layer: u32, tokens: u32) -> Result<()> {
        let block = self.geometry.shape.block_tokens;
        let mut unknown: Vec<u32> = Vec::new();
        unknown.try_reserve_exact((tokens / block) as usize).map_err(|_| Status::NoMem)?;
        unknown.extend(0..tokens / block);
        if let Some(saved) = &mut self.saved {
            let what = (layer, tokens, block);
            unknown = saved.load(&self.store, self.session, &mut self.policies, what)?;
        }
        if !self.policies.all().any(|policy| wants_keys(&**policy)) {
            return Ok(());
        }
        let at_once = (self.geometry.buffer_tokens / block) as usize;
        let context = Context { tokens, ..Context::default() };
        for ids in unknown.chunks(at_once) {
            self.done(0)?;
            self.load(0, layer, Which::Blocks(ids), None, &context)?;
            self.wait(0)?;
            let sealed = self.seal_loaded(layer, ids);
            self.done(0)?;
            sealed?;
        }
        Ok(())
    }

    /// Policies see the keys of blocks that are in buffer 0.
    fn seal_loaded(&mut self, layer: u32, ids: &[u32]) -> Result<()> {
        let (geometry, at) = (self.geometry, self.ring.at(0));
        let (block, heads) = (geometry.shape.block_tokens, geometry.shape.key_heads);
        let tokens = ids.len() as u32 * block;
        let address = self.memory.range(at, u64::from(tokens) * geometry.k_bytes)?;
        let all = (address, self.memory.memory());
        let shown = self.show(vec![canonical(all, tokens, heads, geometry.k_bytes)])?;
        let Some(keys) = shown.first() else { return Ok(()) };
        for (row, &id) in (0u32..).zip(ids) {
            let plane = part_of(keys, row * block, block).ok_or(Status::Invalid)?;
            // SAFETY: rows of the buffer, which was waited for and is not given back yet, or
            // a copy.
            let keys = unsafe { rows_of(&geometry, &plane)? };
            for policy in self.policies.all().filter(|policy| policy.traits().rows.is_none()) {
                policy.seal(layer, id, id * block, &keys)?;
            }
        }
        Ok(())
    }
}
