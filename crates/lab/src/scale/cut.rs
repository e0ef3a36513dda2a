//! Objects of a chunk, cut with the shape of the remote tier.

use kvtier::base::status::Result;
use kvtier::fail;
use kvtier::format::record::{blocks_of, header_blocks};
use kvtier::format::segment::BLOCK_BYTES;
use kvtier::meta::dtype::Dtype;
use kvtier::meta::layout::{Group, Layout};
use kvtier::tier::remote::shape::Shape;

/// Objects of a chunk.
pub struct Cutting {
    /// Stored bytes of each object, with header and padding to blocks.
    pub bytes: Vec<u64>,
    /// Sum of `bytes`.
    pub chunk_bytes: u64,
}

impl Cutting {
    /// Objects of chunks of `tokens` tokens with `token_bytes` each, equal in all layers.
    pub fn new(tokens: u32, token_bytes: u64, layers: u16, object_bytes: u64) -> Result<Cutting> {
        let each = u64::from(layers);
        if layers == 0 || token_bytes == 0 || token_bytes % each != 0 {
            fail!(Invalid, "{token_bytes} bytes per token are not a multiple of {layers} layers");
        }
        let group = Group::mla_latent(0..layers, (token_bytes / each) as u32, Dtype::Bytes)?;
        let shape = Shape::new(&Layout::new(tokens, vec![group])?, object_bytes)?;
        let mut bytes = Vec::new();
        for object in 0..shape.objects() {
            let cells = shape.cells(object);
            let planes = cells.iter().map(|cell| cell.planes().len()).sum();
            let Some(header) = header_blocks(cells.len(), planes) else {
                fail!(Limit, "{} layers are too many for a record", cells.len());
            };
            let filled: u64 = cells.iter().map(|cell| blocks_of(cell.bytes())).sum();
            bytes.push((u64::from(header) + filled) * BLOCK_BYTES as u64);
        }
        let chunk_bytes = bytes.iter().sum();
        Ok(Cutting { bytes, chunk_bytes })
    }

    /// Objects per chunk.
    pub fn objects(&self) -> usize {
        self.bytes.len()
    }
}
