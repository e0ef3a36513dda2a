//! What a device can compute on memory that it reaches: one flat description for all kernels,
//! the same in the C header, in the kernels' own header and for the devices of engines.

/// One kernel. Addresses are the device's, distances are bytes, 0 = none. Each kernel uses some
/// of the fields, and those that it does not use are 0: `cuda/kernels/call.h` says which.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Call {
    /// [`Kind`], as a number.
    pub kind: u32,
    /// What keys and values, or what is read, are.
    pub dtype: u32,
    /// What queries and the output, or what is written, are.
    pub other_dtype: u32,
    /// What scales belong to.
    pub scaling: u32,
    /// Queries.
    pub queries: u64,
    /// Keys, or what is read.
    pub keys: u64,
    /// Values.
    pub values: u64,
    /// What is written.
    pub out: u64,
    /// Lists of places.
    pub index: u64,
    /// How long each list is.
    pub counts: u64,
    /// Where pages are.
    pub table: u64,
    /// Numbers that are read or changed: boxes, scores, sums.
    pub numbers: u64,
    /// More of them, as the kernel says.
    pub more: u64,
    /// Scales of narrow numbers.
    pub scales: u64,
    /// Memory for the kernel alone, while it runs.
    pub scratch: u64,
    /// How much that is.
    pub scratch_bytes: u64,
    /// From a query to the next.
    pub query_stride: i64,
    /// From a head of a query to the next.
    pub query_head_stride: i64,
    /// From a key to the next.
    pub key_stride: i64,
    /// From a head of a key to the next.
    pub key_head_stride: i64,
    /// From a value to the next.
    pub value_stride: i64,
    /// From a head of a value to the next.
    pub value_head_stride: i64,
    /// From a row of what is written to the next.
    pub out_stride: i64,
    /// From a head of it to the next.
    pub out_head_stride: i64,
    /// How many queries.
    pub query_count: u32,
    /// Heads of a query.
    pub query_heads: u32,
    /// Heads of a key.
    pub key_heads: u32,
    /// Numbers of a key's head.
    pub key_dim: u32,
    /// Numbers of a value's head.
    pub value_dim: u32,
    /// Tokens of a page or block.
    pub page_tokens: u32,
    /// Tokens that the sequence has.
    pub tokens: u32,
    /// The first of what is worked on.
    pub first: u32,
    /// How many.
    pub count: u32,
    /// How many stay, or are chosen.
    pub keep: u32,
    /// So many of the last stay.
    pub recent: u32,
    /// So many of the first stay.
    pub sinks: u32,
    /// What products are multiplied with.
    pub scale: f32,
    /// What else the kernel is to do.
    pub flags: u32,
    /// 0.
    pub reserved: [u64; 3],
}

impl Call {
    /// Scratch of a [`Kind::Prefill`] that is told of an index: bits of lines, for each head of it.
    pub fn line_bytes(&self) -> u64 {
        let end = (u64::from(self.first) + u64::from(self.query_count)).max(self.tokens.into());
        u64::from(self.count) * 3 * (end / 32 + 8) * 4
    }
}

/// Which kernel.
#[repr(u32)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Moves runs of bytes.
    Move = 1,
    /// Changes what numbers are, with scales or without.
    Convert = 2,
    /// Sums bytes as the store does.
    Sum = 3,
    /// Makes the boxes of pages wider.
    PageBoxes = 4,
    /// The most that a query can have of each page.
    PageScores = 5,
    /// The largest of each row.
    Top = 6,
    /// Adds weights to what tokens had.
    Add = 7,
    /// Which tokens stay.
    Keep = 8,
    /// Moves what stays together.
    Compact = 9,
    /// Columns and diagonals of the last queries.
    Estimate = 10,
    /// Attention of a prompt over lines or blocks.
    Prefill = 11,
    /// Attention of few queries over chosen pages.
    Decode = 12,
}

impl Kind {
    /// All of them.
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

    /// The kernel of a number.
    pub fn of(number: u32) -> Option<Kind> {
        Kind::ALL.into_iter().find(|kind| *kind as u32 == number)
    }

    /// Its place in a set of kernels.
    pub fn bit(self) -> u64 {
        1 << self as u32
    }
}

const _: () = assert!(std::mem::size_of::<Call>() == 256);
