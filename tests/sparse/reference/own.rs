//! Policies and models of these tests: a policy that selects given tokens only, and models with
//! random weights.

use kvtier::attention::Rows;
use kvtier::base::status::Result;
use kvtier::sparse::{Context, Index, Scope, Sparse, Traits, caps};

use crate::reference::rows::tokens;

/// Names the same tokens at every step, for each layer and head of keys, and all behind the
/// prompt.
#[derive(Clone)]
pub struct Fixed {
    pub lists: Vec<Vec<Vec<u32>>>,
    pub prompt: u32,
}

impl Sparse for Fixed {
    fn traits(&self) -> Traits {
        Traits { caps: caps::INDEX_DECODE, scope: Scope::KeyHead, ..Traits::NONE }
    }

    fn index(
        &mut self,
        layer: u32,
        queries: &Rows<'_>,
        _keys: Option<&Rows<'_>>,
        context: &Context,
        out: &mut Index,
    ) -> Result<()> {
        let of = &self.lists[layer as usize];
        // An index is of query heads.
        let group = queries.heads() as usize / of.len();
        let since = self.prompt..context.tokens;
        let list = |head: usize| of[head / group].iter().copied().chain(since.clone()).collect();
        let lists: Vec<Vec<u32>> = (0..queries.heads() as usize).map(list).collect();
        *out = tokens(&lists);
        Ok(())
    }

    fn truncate(&mut self, _tokens: u32) -> Result<()> {
        Ok(())
    }

    fn reset(&mut self) {}

    fn fork(&self) -> Result<Box<dyn Sparse>> {
        Ok(Box::new(self.clone()))
    }
}
