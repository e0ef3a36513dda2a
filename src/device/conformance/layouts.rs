//! Checks of engines' tensor layouts against a formula for the offset of each byte.

use crate::device::conformance::bench::Bench;
use crate::device::conformance::{Outcome, need};
use crate::device::{Copy, Direction, Memory};
use crate::meta::view::{Place, View};

/// A tensor layout.
struct Shape {
    tokens: u32,
    heads: u32,
    run: u64,
    token_stride: u64,
    head_stride: u64,
    /// Page starts; one page if the tensor is not paged.
    pages: Vec<u64>,
    page_tokens: u32,
    len: usize,
}

impl Shape {
    fn any(bench: &Bench<'_>) -> Shape {
        let pick = |n| bench.chance.below(n);
        let (tokens, heads) = (1 + pick(60), 1 + pick(7));
        let run = bench.chance.of(&[1, 3, 7, 16, 64, 128, 250, 256, 1500]);
        let pad = pick(9);
        let rows = if pick(2) == 0 { 1 + pick(16) } else { tokens };
        let (token_stride, head_stride) = match pick(4) {
            0 => (heads * run, run),                         // [tokens, heads, dim]
            1 => (run, rows * run),                          // [heads, tokens, dim]
            2 => (2 * heads * (run + pad), 2 * (run + pad)), // K and V interleaved
            _ => (heads * run + pad, run),                   // padded rows
        };
        let page_bytes = rows * token_stride + heads * head_stride;
        let count = tokens.div_ceil(rows);
        // Pages in a mixed order: some adjoin, some do not.
        let mut pages: Vec<u64> = (0..count).map(|page| 5 + page * page_bytes).collect();
        for at in (1..pages.len()).rev() {
            if pick(3) == 0 {
                pages.swap(at, pick(at as u64 + 1) as usize);
            }
        }
        let len = (5 + count * page_bytes) as usize;
        let (tokens, heads, page_tokens) = (tokens as u32, heads as u32, rows as u32);
        Shape { tokens, heads, run, token_stride, head_stride, pages, page_tokens, len }
    }

    /// Offsets of the bytes of some tokens, in canonical order.
    fn offsets(&self, first: u32, tokens: u32) -> Vec<usize> {
        let mut out = Vec::new();
        for token in first..first + tokens {
            let page = self.pages[(token / self.page_tokens) as usize];
            let start = page + u64::from(token % self.page_tokens) * self.token_stride;
            for head in 0..u64::from(self.heads) {
                let run = start + head * self.head_stride;
                out.extend((run..run + self.run).map(|offset| offset as usize));
            }
        }
        out
    }

    fn view<'a>(&self, address: u64, table: &'a mut Vec<u64>) -> View<'a> {
        table.extend(self.pages.iter().map(|page| address + page + 100));
        let (addresses, page_tokens) = (table.as_slice(), self.page_tokens);
        View {
            place: Place::Pages { addresses, page_tokens, shift_bytes: -100 },
            tokens: self.tokens,
            heads: self.heads,
            run_bytes: self.run,
            token_stride_bytes: self.token_stride,
            head_stride_bytes: self.head_stride,
        }
    }
}

/// Every layout survives a copy to a plane and back, in all address spaces.
pub fn layouts(bench: &Bench<'_>) -> Outcome {
    for _ in 0..bench.rounds * 2 {
        for tensor in bench.places() {
            for plane in bench.places() {
                there_and_back(bench, tensor, plane)?;
            }
        }
    }
    Ok(())
}

fn there_and_back(bench: &Bench<'_>, tensor_memory: Memory, plane_memory: Memory) -> Outcome {
    let shape = Shape::any(bench);
    let first = bench.chance.below(shape.tokens.into()) as u32;
    let tokens = 1 + bench.chance.below((shape.tokens - first).into()) as u32;
    let offsets = shape.offsets(first, tokens);
    let (skew, len) = (bench.chance.below(64) as usize, offsets.len());
    let tensor = bench.buffer(tensor_memory, shape.len)?;
    let plane = bench.buffer(plane_memory, skew + len + 70)?;
    let (mut whole, mut around) = (tensor.bytes()?, plane.bytes()?);
    let mut table = Vec::new();
    let view = shape.view(tensor.address, &mut table);
    let copy = |direction| -> Outcome<Copy<'_>> {
        let pointer = plane.pointer().wrapping_add(skew);
        let copy =
            bench.require_ok("a copy", Copy::new(&view, first, tokens, pointer, direction))?;
        Ok(Copy { memory: tensor_memory, plane_memory, ..copy })
    };
    let wrong = |direction: &str| {
        format!(
            "{direction} {tokens} tokens of {} heads of {} bytes, strides {} and {}, pages of {}, \
             {tensor_memory:?} and {plane_memory:?}: wrong bytes, or bytes beside them",
            shape.heads, shape.run, shape.token_stride, shape.head_stride, shape.page_tokens
        )
    };
    bench.do_copy(copy(Direction::Gather)?)?;
    offsets.iter().zip(&mut around[skew..]).for_each(|(&at, byte)| *byte = whole[at]);
    need(plane.bytes()? == around && tensor.bytes()? == whole, || wrong("gathering"))?;

    around = bench.chance.noise(around.len());
    plane.set(&around)?;
    bench.do_copy(copy(Direction::Scatter)?)?;
    offsets.iter().zip(&around[skew..]).for_each(|(&at, byte)| whole[at] = *byte);
    need(plane.bytes()? == around && tensor.bytes()? == whole, || wrong("scattering"))
}
