//! How the layers of a chunk are divided into objects. The division follows from the layout and one
//! number, so that all stores with that number request the same objects.

use std::ops::Range;

use crate::base::status::Result;
use crate::fail;
use crate::format::keys::object::LayerRange;
use crate::format::record::{MAX_CELLS, blocks_of, header_blocks};
use crate::format::seal::{PLANE_K, PLANE_STATE, PLANE_V};
use crate::format::segment::BLOCK_BYTES;
use crate::meta::layout::{Layout, Rule};

/// Least length of objects that can be configured.
pub const MIN_OBJECT_BYTES: u64 = 4 << 10;
/// Largest: with a header, and every cell padded to blocks, the object is still one record.
pub const MAX_OBJECT_BYTES: u64 = 128 << 20;

/// The planes of a full chunk's cell: kind and length.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CellShape {
    planes: [(u16, u64); 2],
    count: usize,
}

impl CellShape {
    /// The planes, in the order of their bytes.
    pub fn planes(&self) -> &[(u16, u64)] {
        &self.planes[..self.count]
    }

    /// Bytes of all planes.
    pub fn bytes(&self) -> u64 {
        self.planes().iter().map(|&(_, bytes)| bytes).sum()
    }
}

/// The objects of a chunk.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Shape {
    object_bytes: u64,
    chunk_tokens: u32,
    cells: Vec<CellShape>,
    /// The first layer of each object, then the number of layers.
    starts: Vec<u32>,
}

impl Shape {
    /// Divides the full chunks of a layout into objects of at most `object_bytes` bytes.
    pub fn new(layout: &Layout, object_bytes: u64) -> Result<Shape> {
        if !(MIN_OBJECT_BYTES..=MAX_OBJECT_BYTES).contains(&object_bytes) {
            fail!(
                Limit,
                "objects of {object_bytes} bytes; {MIN_OBJECT_BYTES} to {MAX_OBJECT_BYTES} are \
                 possible"
            );
        }
        let tokens = layout.chunk_tokens();
        let cells: Vec<CellShape> =
            (0..layout.layers()).map(|layer| cell_shape(layout, layer, tokens)).collect();
        let mut starts = vec![0];
        let (mut bytes, mut layers) = (0u64, 0);
        for (layer, cell) in (0u32..).zip(&cells) {
            if layers > 0 && (bytes + cell.bytes() > object_bytes || layers == MAX_CELLS) {
                starts.push(layer);
                (bytes, layers) = (0, 0);
            }
            bytes += cell.bytes();
            layers += 1;
        }
        starts.push(cells.len() as u32);
        Ok(Shape { object_bytes, chunk_tokens: tokens, cells, starts })
    }

    /// Number of objects of a chunk.
    pub fn objects(&self) -> usize {
        self.starts.len() - 1
    }

    /// Stored length of its longest object.
    pub fn most_bytes(&self) -> u64 {
        let bytes = |object| {
            let cells = self.cells(object);
            let planes = cells.iter().map(|cell| cell.planes().len()).sum();
            let header = header_blocks(cells.len(), planes).map_or(0, u64::from);
            let blocks: u64 = cells.iter().map(|cell| blocks_of(cell.bytes())).sum();
            (header + blocks) * BLOCK_BYTES as u64
        };
        (0..self.objects()).map(bytes).max().unwrap_or(0)
    }

    /// Tokens of a chunk.
    pub fn chunk_tokens(&self) -> u32 {
        self.chunk_tokens
    }

    /// The layers of an object, by its index.
    pub fn layers(&self, object: usize) -> Range<u32> {
        match self.starts.get(object..).unwrap_or(&[]) {
            [first, end, ..] => *first..*end,
            _ => 0..0,
        }
    }

    /// The object that contains a layer.
    pub fn object_of(&self, layer: u32) -> Option<usize> {
        let is_one = (layer as usize) < self.cells.len();
        is_one.then(|| self.starts.partition_point(|&start| start <= layer) - 1)
    }

    /// The part of an object's name that follows from the division.
    pub fn cut(&self, object: usize) -> LayerRange {
        let layers = self.layers(object);
        let Shape { object_bytes, .. } = *self;
        LayerRange { object_bytes, first: layers.start, layers: layers.end - layers.start }
    }

    /// The cells of an object, by layer.
    pub fn cells(&self, object: usize) -> &[CellShape] {
        let layers = self.layers(object);
        self.cells.get(layers.start as usize..layers.end as usize).unwrap_or(&[])
    }
}

/// The planes of a stored cell.
fn cell_shape(layout: &Layout, layer: usize, tokens: u32) -> CellShape {
    let mut shape = CellShape { planes: [(0, 0); 2], count: 0 };
    let Some(group) = layout.group(layer) else { return shape };
    let first = if group.rule == Rule::State { PLANE_STATE } else { PLANE_K };
    let planes = group.planes(tokens);
    for (kind, bytes) in [(first, planes.k_bytes), (PLANE_V, planes.v_bytes)] {
        if bytes > 0 {
            shape.planes[shape.count] = (kind, bytes);
            shape.count += 1;
        }
    }
    shape
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::format::record::MAX_RECORD_BLOCKS;
    use crate::meta::dtype::Dtype;
    use crate::meta::layout::Group;
    use proptest::prelude::*;

    fn even(layers: u16, k_bytes: u64) -> Layout {
        let dim = (k_bytes / 2) as u32;
        let group = Group::mla_latent(0..layers, dim, Dtype::Bf16).unwrap();
        Layout::new(1, vec![group]).unwrap()
    }

    #[test]
    fn layers_are_grouped_up_to_the_object_size() {
        let shape = Shape::new(&even(7, 3000), 10_000).unwrap();
        assert_eq!((shape.objects(), shape.layers(0), shape.layers(2)), (3, 0..3, 6..7));
        assert_eq!(shape.cut(1), LayerRange { object_bytes: 10_000, first: 3, layers: 3 });
        assert_eq!((shape.object_of(2), shape.object_of(3)), (Some(0), Some(1)));
        assert_eq!((shape.object_of(6), shape.object_of(7)), (Some(2), None));
        assert_eq!((shape.layers(3), shape.cells(3).len()), (0..0, 0));
        // A cell longer than the limit is an object by itself.
        let shape = Shape::new(&even(3, 10_002), 10_000).unwrap();
        assert_eq!((shape.objects(), shape.layers(1)), (3, 1..2));
        // An object has as many cells as a record may have.
        let shape = Shape::new(&even(4096, 2), MAX_OBJECT_BYTES).unwrap();
        assert_eq!((shape.objects(), shape.layers(1)), (2, 2048..4096));
    }

    #[test]
    fn object_sizes_outside_the_limits_are_rejected() {
        for wrong in [0, MIN_OBJECT_BYTES - 1, MAX_OBJECT_BYTES + 1, u64::MAX] {
            assert!(Shape::new(&even(1, 2), wrong).is_err(), "{wrong}");
        }
    }

    proptest! {
        #[test]
        fn every_layer_is_in_exactly_one_valid_object(
            sizes in prop::collection::vec(1u64..9_000_000, 1..6),
            of in prop::collection::vec(0usize..6, 1..200),
            object_bytes in prop_oneof![4096u64..100_000, Just(MAX_OBJECT_BYTES), Just(1 << 20)],
        ) {
            let mut groups: Vec<Group> =
                sizes.iter().map(|&bytes| Group::state([], bytes, Dtype::Bytes)).collect();
            for (layer, of) in of.iter().enumerate() {
                let at = of % groups.len();
                groups[at].layers.push(layer as u16);
            }
            groups.retain(|group| !group.layers.is_empty());
            let shape = Shape::new(&Layout::new(16, groups).unwrap(), object_bytes).unwrap();
            let mut next = 0;
            for object in 0..shape.objects() {
                let layers = shape.layers(object);
                prop_assert_eq!(layers.start, next);
                next = layers.end;
                let cells = shape.cells(object);
                prop_assert_eq!(cells.len(), layers.len());
                let raw: u64 = cells.iter().map(CellShape::bytes).sum();
                prop_assert!(raw <= object_bytes || cells.len() == 1);
                let planes = cells.iter().map(|cell| cell.planes().len()).sum();
                let header = header_blocks(cells.len(), planes).map(u64::from);
                let blocks: u64 = cells.iter().map(|cell| blocks_of(cell.bytes())).sum();
                prop_assert!(header.is_some_and(|n| n + blocks <= u64::from(MAX_RECORD_BLOCKS)));
                // The next layer would have exceeded the limit.
                if let Some(more) = shape.cells(object + 1).first() {
                    prop_assert!(raw + more.bytes() > object_bytes);
                }
                prop_assert!(layers.clone().all(|layer| shape.object_of(layer) == Some(object)));
            }
            prop_assert_eq!(next as usize, of.len());
        }
    }
}
