//! The argument of all kernels: one flat struct. `cuda/kernels/call.h` and the C header declare the
//! same struct.

/// Argument of one kernel launch. Addresses are device addresses, strides are in bytes, 0 = unused.
/// Each kernel uses some of the fields; the others must be 0. `cuda/kernels/call.h` lists the
/// fields of each kernel.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Call {
    /// Kernel: a [`Kind`].
    pub kind: u32,
    /// Element type of keys and values, or of the input.
    pub dtype: u32,
    /// Element type of queries and output, or of the output.
    pub other_dtype: u32,
    /// How scales apply: 0 none, 1 by token, 2 by channel.
    pub scaling: u32,
    /// Address of the queries.
    pub queries: u64,
    /// Address of the keys, or of the input.
    pub keys: u64,
    /// Address of the values.
    pub values: u64,
    /// Address of the output.
    pub out: u64,
    /// Address of lists of positions.
    pub index: u64,
    /// Address of the length of each list.
    pub counts: u64,
    /// Address of the page table.
    pub table: u64,
    /// Address of numbers that are read or updated: boxes, scores, sums.
    pub numbers: u64,
    /// Address of further numbers; the kernel defines them.
    pub more: u64,
    /// Address of the scales of quantized numbers.
    pub scales: u64,
    /// Address of scratch memory.
    pub scratch: u64,
    /// Size of the scratch memory.
    pub scratch_bytes: u64,
    /// Distance between queries.
    pub query_stride: i64,
    /// Distance between heads of a query.
    pub query_head_stride: i64,
    /// Distance between keys.
    pub key_stride: i64,
    /// Distance between heads of a key.
    pub key_head_stride: i64,
    /// Distance between values.
    pub value_stride: i64,
    /// Distance between heads of a value.
    pub value_head_stride: i64,
    /// Distance between rows of the output.
    pub out_stride: i64,
    /// Distance between heads of an output row.
    pub out_head_stride: i64,
    /// Number of queries.
    pub query_count: u32,
    /// Heads of a query.
    pub query_heads: u32,
    /// Heads of a key.
    pub key_heads: u32,
    /// Elements of a key head.
    pub key_dim: u32,
    /// Elements of a value head.
    pub value_dim: u32,
    /// Tokens of a page or block.
    pub page_tokens: u32,
    /// Tokens of the sequence.
    pub tokens: u32,
    /// First item to process.
    pub first: u32,
    /// Number of items.
    pub count: u32,
    /// Number of items to keep or choose.
    pub keep: u32,
    /// Last tokens that are always kept.
    pub recent: u32,
    /// First tokens that are always kept.
    pub sinks: u32,
    /// Factor of the products of queries and keys.
    pub scale: f32,
    /// Flags of the kernel.
    pub flags: u32,
    /// 0.
    pub reserved: [u64; 3],
}

impl Call {
    /// Scratch bytes of a [`Kind::Prefill`] with an index: bit sets of positions for each head of
    /// the index.
    pub fn line_bytes(&self) -> u64 {
        let end = (u64::from(self.first) + u64::from(self.query_count)).max(self.tokens.into());
        u64::from(self.count) * 3 * (end / 32 + 8) * 4
    }
}

/// Kernels.
#[repr(u32)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Copies runs of bytes.
    Move = 1,
    /// Converts numbers to another type, with or without scales.
    Convert = 2,
    /// Computes the store's checksums.
    Sum = 3,
    /// Extends the bounding boxes of pages by new keys.
    PageBoxes = 4,
    /// Computes an upper bound of a query's product with the keys of each page.
    PageScores = 5,
    /// Finds the largest scores of each row.
    Top = 6,
    /// Adds attention weights to accumulated scores of tokens.
    Add = 7,
    /// Chooses the tokens to keep.
    Keep = 8,
    /// Compacts the rows of kept tokens.
    Compact = 9,
    /// Estimates column and diagonal weights from the last queries.
    Estimate = 10,
    /// Attention of a prompt over columns, diagonals or blocks.
    Prefill = 11,
    /// Attention of few queries over chosen pages.
    Decode = 12,
}

impl Kind {
    /// All kernels.
    pub const ALL: [Kind; 12] = [
        Kind::Move,
        Kind::Convert,
        Kind::Sum,
        Kind::PageBoxes,
        Kind::PageScores,
        Kind::Top,
        Kind::Add,
        Kind::Keep,
        Kind::Compact,
        Kind::Estimate,
        Kind::Prefill,
        Kind::Decode,
    ];

    /// The kernel with a number.
    pub fn of(number: u32) -> Option<Kind> {
        Kind::ALL.into_iter().find(|kind| *kind as u32 == number)
    }

    /// Bit in a set of kernels ([`crate::device::Facts::kernels`]).
    pub fn bit(self) -> u64 {
        1 << self as u32
    }
}

const _: () = assert!(std::mem::size_of::<Call>() == 256);
