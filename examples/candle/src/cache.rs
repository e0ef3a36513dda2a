//! The KV cache of one sequence: one tensor for all layers, and its transfers to and from a store
//! of kvtier, without a copy in between.

use std::cell::RefCell;
use std::ops::Range;

use candle_core::{
    CpuStorage, DType, Device, IndexOp, InplaceOp1, Layout as TensorLayout, Result, Storage,
    Tensor, bail,
};
use kvtier::api::{self, Dtype, Group, Layer, Layout, Level, Session, Source, Strides, Target};

use crate::llama::Config;

/// KV of up to `capacity` tokens.
pub struct KvCache {
    /// `[layers, K and V, kv_heads, capacity, head_dim]`
    all: Tensor,
    tokens: usize,
}

impl KvCache {
    pub fn new(config: &Config, capacity: usize) -> Result<KvCache> {
        if capacity > config.max_position_embeddings {
            bail!(
                "{capacity} tokens: the model has at most {} positions",
                config.max_position_embeddings
            );
        }
        let (layers, heads) = (config.num_hidden_layers, config.num_key_value_heads);
        let shape = (layers, 2, heads, capacity, config.head_dim());
        Ok(KvCache { all: Tensor::zeros(shape, DType::F32, &Device::Cpu)?, tokens: 0 })
    }

    /// Tokens whose KV is in the cache.
    pub fn tokens(&self) -> usize {
        self.tokens
    }

    /// Sets the number of tokens: their KV is in the cache.
    pub fn set_tokens(&mut self, tokens: usize) {
        self.tokens = tokens;
    }

    /// K and V of a layer, which are parts of the cache, and the number of tokens that it is to
    /// hold.
    pub fn layer(&self, at: usize, end: usize) -> Result<(Tensor, Tensor, usize)> {
        let capacity = self.all.dim(3)?;
        if end > capacity {
            bail!("{end} tokens do not fit into a KV cache of {capacity}");
        }
        Ok((self.all.i((at, 0))?, self.all.i((at, 1))?, end))
    }

    /// The layout of this KV in a store.
    pub fn store_layout(config: &Config, chunk_tokens: usize) -> api::Result<Layout> {
        let (layers, heads) = (config.num_hidden_layers as u16, config.num_key_value_heads as u32);
        let group = Group::gqa(0..layers, heads, config.head_dim() as u32, Dtype::F32)?;
        Layout::new(chunk_tokens as u32, vec![group])
    }

    /// Stores the KV of tokens.
    pub fn put(
        &self,
        session: &Session,
        tokens: Range<usize>,
        level: Level,
    ) -> anyhow::Result<u64> {
        let planes = self.planes(tokens.start)?;
        let (storage, _layout) = self.all.storage_and_layout();
        let Storage::Cpu(CpuStorage::F32(numbers)) = &*storage else {
            anyhow::bail!("the cache is not in host memory");
        };
        let bytes: &[u8] = bytemuck::cast_slice(numbers);
        let Planes { strides, bytes: plane_bytes, skip } = planes;
        let layers = bytes.chunks_exact(2 * plane_bytes).map(|layer| {
            let (k, v) = layer.split_at(plane_bytes);
            let [k, v] = [k, v].map(|plane| Source::strided(&plane[skip..], strides));
            Layer::kv(k, v)
        });
        Ok(session.put(tokens.start as u64..tokens.end as u64, 0, layers, level)?.tokens)
    }

    /// Loads the KV of the first tokens; returns how many arrived without a gap.
    pub fn get(&mut self, session: &Session, tokens: usize) -> anyhow::Result<u64> {
        let load = Load { session, tokens, planes: self.planes(0)?, got: RefCell::new(Ok(0)) };
        // candle gives out its memory for writing to operations only.
        self.all.inplace_op1(&load)?;
        Ok(load.got.into_inner()?)
    }

    /// The planes in memory, from a token on.
    fn planes(&self, first: usize) -> Result<Planes> {
        let (_, _, heads, capacity, dim) = self.all.dims5()?;
        let row = dim * size_of::<f32>();
        let strides = Strides {
            heads: heads as u32,
            head_bytes: row as u64,
            token_stride_bytes: row as u64,
            head_stride_bytes: (capacity * row) as u64,
        };
        Ok(Planes { strides, bytes: heads * capacity * row, skip: first * row })
    }
}

/// Where K or V of a layer is in memory.
struct Planes {
    strides: Strides,
    /// Bytes of K or V of a layer.
    bytes: usize,
    /// Bytes before the first token.
    skip: usize,
}

/// Loads KV into the memory of a tensor.
struct Load<'a> {
    session: &'a Session,
    tokens: usize,
    planes: Planes,
    got: RefCell<api::Result<u64>>,
}

impl InplaceOp1 for Load<'_> {
    fn name(&self) -> &'static str {
        "kvtier-get"
    }

    fn cpu_fwd(&self, storage: &mut CpuStorage, _layout: &TensorLayout) -> Result<()> {
        let CpuStorage::F32(numbers) = storage else {
            bail!("the cache is not f32: create it with DType::F32")
        };
        let Planes { strides, bytes, skip } = self.planes;
        let all: &mut [u8] = bytemuck::cast_slice_mut(numbers);
        let layers = all.chunks_exact_mut(2 * bytes).map(|layer| {
            let (k, v) = layer.split_at_mut(bytes);
            let [k, v] = [k, v].map(|plane| Target::strided(&mut plane[skip..], strides));
            Layer::kv(k, v)
        });
        let moved = self.session.get(0..self.tokens as u64, 0, layers);
        *self.got.borrow_mut() = moved.map(|moved| moved.tokens);
        Ok(())
    }
}
