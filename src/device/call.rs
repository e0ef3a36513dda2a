//! The argument of all kernels: one flat struct. It is `kvt_kernel_t` of the C header, and
//! `cuda/kernels/call.h` declares it for the kernels.

/// One kernel launch: the same 256 bytes for all kernels. Addresses are device addresses, strides
/// are in bytes, unused fields are 0. docs/internals/kernels.md lists the fields of each kernel.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq)]
#[allow(missing_docs)] // fields whose name says all have no comment in the C header
pub struct Call {
    /// KVT_DEVICE_KERNEL_*.
    pub kind: u32,
    /// KVT_DTYPE_* of keys and values, or of the input.
    pub dtype: u32,
    /// KVT_DTYPE_* of queries and output, or of the output.
    pub other_dtype: u32,
    /// KVT_SCALES_*.
    pub scaling: u32,
    pub queries: u64,
    /// Keys, or the input.
    pub keys: u64,
    pub values: u64,
    /// The output.
    pub out: u64,
    /// Lists of positions, and the length of each list.
    pub index: u64,
    pub counts: u64,
    /// Page table, or list of ranges.
    pub table: u64,
    /// Numbers that are read or updated (boxes, scores, sums), and further ones.
    pub numbers: u64,
    pub more: u64,
    /// Scales of quantized numbers.
    pub scales: u64,
    pub scratch: u64,
    pub scratch_bytes: u64,
    /// Distances from an item to the next, and from a head of an item to the next.
    pub query_stride: i64,
    pub query_head_stride: i64,
    pub key_stride: i64,
    pub key_head_stride: i64,
    pub value_stride: i64,
    pub value_head_stride: i64,
    pub out_stride: i64,
    pub out_head_stride: i64,
    pub query_count: u32,
    pub query_heads: u32,
    pub key_heads: u32,
    /// Elements of a key head, and of a value head.
    pub key_dim: u32,
    pub value_dim: u32,
    /// Tokens of a page or block.
    pub page_tokens: u32,
    /// Tokens of the sequence.
    pub tokens: u32,
    /// First item to process, and number of items.
    pub first: u32,
    pub count: u32,
    /// Items to keep or choose; last and first items that are always kept.
    pub keep: u32,
    pub recent: u32,
    pub sinks: u32,
    /// Factor of the products of queries and keys.
    pub scale: f32,
    /// Flags of the kernel.
    pub flags: u32,
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
