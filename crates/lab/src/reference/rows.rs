//! Floats in memory as rows for kernels and policies.

use kvtier::attention::{Rows, Scales};
use kvtier::base::status::Result;
use kvtier::meta::dtype::Dtype;
use kvtier::meta::view::{Place, View};
use kvtier::sparse::index::{Head, Index, Kind};

/// Contiguous rows `[tokens, heads, dim]`.
pub fn contiguous(numbers: &[f32], heads: u32, dim: u32) -> Result<Rows<'_>> {
    let row = u64::from(heads) * u64::from(dim);
    let view = View {
        place: Place::At(numbers.as_ptr() as u64),
        tokens: (numbers.len() as u64 / row) as u32,
        heads,
        run_bytes: u64::from(dim) * 4,
        token_stride_bytes: row * 4,
        head_stride_bytes: u64::from(dim) * 4,
    };
    // SAFETY: the view covers exactly the slice, which stays borrowed as long as the rows.
    unsafe { Rows::new(view, Dtype::F32, Scales::None) }
}

/// Appends all floats of f32 rows to a list.
pub fn to_f32(rows: &Rows<'_>, out: &mut Vec<f32>) {
    for token in 0..rows.tokens() {
        for head in 0..rows.heads() {
            let at = rows.row(token, head).cast::<f32>();
            // SAFETY: the row exists and holds f32.
            out.extend_from_slice(unsafe { std::slice::from_raw_parts(at, rows.dim() as usize) });
        }
    }
}

/// An index of rows for each query head.
pub fn tokens(picked: &[Vec<u32>]) -> Index {
    let mut index = Index::default();
    for (head, rows) in (0..).zip(picked) {
        index.lists.push(rows.iter().copied());
        let of = Head { kind: Kind::Blocks, first: head, lists: 1, key_block: 1, ..Head::DENSE };
        index.heads.push(of);
    }
    index
}
