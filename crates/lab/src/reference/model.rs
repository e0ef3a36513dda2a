//! The weights of a model, from a file of `ffi-tests/models/train.py`.

use kvtier::base::status::{Error, Result, Status};
use kvtier::sparse::{Kind, Shape};

/// Most tokens of a sequence.
pub const MAX_TOKENS: u32 = 40 * 1024;

/// Dimensions, in the order of the file's header.
#[derive(Clone, Copy, Debug)]
pub struct Sizes {
    /// Size of the vocabulary.
    pub vocab: usize,
    /// Number of layers.
    pub layers: usize,
    /// Dimension of the residual stream.
    pub width: usize,
    /// Inner dimension of the gated layer.
    pub hidden: usize,
    /// Number of query heads.
    pub heads: usize,
    /// Number of key heads.
    pub key_heads: usize,
    /// Dimensions of a key without rotation.
    pub nope: usize,
    /// Dimensions of a key with rotation (RoPE).
    pub rope: usize,
    /// Dimension of a value.
    pub value: usize,
    /// Dimension of a latent row; 0 = separate keys and values.
    pub latent: usize,
    /// Base of the rotation angles.
    pub theta: f64,
}

/// Form of the cached keys and values.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Form {
    /// By key head, as in the model.
    Split,
    /// Latent attention, with keys and values of every head.
    Expanded,
    /// Latent attention with one row per token; queries are projected into the latent space.
    Latent,
}

/// The weights of a layer.
pub struct Layer {
    /// Norm gain before attention.
    pub first: Vec<f32>,
    /// Query projection.
    pub q: Vec<f32>,
    /// Key projection; for latent attention, the projection to the latent row.
    pub k: Vec<f32>,
    /// Value projection; empty for latent attention.
    pub v: Vec<f32>,
    /// Further weights of latent attention.
    pub latent: Option<Latent>,
    /// Output projection of attention.
    pub o: Vec<f32>,
    /// Norm gain before the gated layer.
    pub second: Vec<f32>,
    /// Gate projection.
    pub gate: Vec<f32>,
    /// Up projection.
    pub up: Vec<f32>,
    /// Down projection.
    pub down: Vec<f32>,
}

/// Weights of latent attention.
pub struct Latent {
    /// Norm gain of the latent row.
    pub norm: Vec<f32>,
    /// Projection to the rotated dimensions, shared by all heads.
    pub pe: Vec<f32>,
    /// Keys of each head from the latent row.
    pub up_k: Vec<f32>,
    /// Values of each head from the latent row.
    pub up_v: Vec<f32>,
}

/// A model.
pub struct Model {
    /// Its dimensions.
    pub sizes: Sizes,
    /// Embedding: a row for each symbol.
    pub symbols: Vec<f32>,
    /// Its layers.
    pub layers: Vec<Layer>,
    /// Norm gain before the output projection.
    pub last: Vec<f32>,
    /// Output projection.
    pub out: Vec<f32>,
    cos: Vec<f32>,
    sin: Vec<f32>,
}

/// Converts a binary16.
fn from_f16(half: u16) -> f32 {
    let (exponent, fraction) = (i32::from(half >> 10 & 31), f32::from(half & 1023));
    let size = match exponent {
        0 => fraction / 1024.0 * 2.0_f32.powi(-14),
        e => (1.0 + fraction / 1024.0) * 2.0_f32.powi(e - 15),
    };
    if half & 0x8000 == 0 { size } else { -size }
}

/// First words of a file: magic number and version.
const MARK: [usize; 2] = [0x4D52_564B, 1];
/// Bytes of the header.
const HEADER: usize = 64;
/// The trained models, by name.
const TRAINED: [(&str, &[u8]); 2] = [
    ("gqa", include_bytes!("../../../../tests/data/models/gqa.kvm")),
    ("mla", include_bytes!("../../../../tests/data/models/mla.kvm")),
];

fn wrong(text: String) -> Error {
    Error::new(Status::Corrupt, text)
}

impl Model {
    /// The trained model with a name.
    pub fn trained(name: &str) -> Result<Model> {
        match TRAINED.iter().find(|(known, _)| *known == name) {
            Some((_, bytes)) => Model::read(bytes),
            None => {
                let known = TRAINED.map(|(name, _)| name).join(", ");
                Err(Error::new(Status::NotFound, format!("no model '{name}'; there are {known}")))
            }
        }
    }

    /// Reads a model from the bytes of a file.
    fn read(bytes: &[u8]) -> Result<Model> {
        let Some((header, numbers)) = bytes.split_at_checked(HEADER) else {
            return Err(wrong(format!("{} bytes are no model", bytes.len())));
        };
        let header: Vec<usize> = header
            .chunks_exact(4)
            .map(|four| four.iter().rev().fold(0, |all, &byte| all << 8 | usize::from(byte)))
            .collect();
        let &[
            mark,
            version,
            _,
            vocab,
            layers,
            width,
            hidden,
            heads,
            key_heads,
            nope,
            rope,
            value,
            latent,
            theta,
            ..,
        ] = header.as_slice()
        else {
            return Err(wrong("a header too short".into()));
        };
        if [mark, version] != MARK {
            return Err(wrong("no file of a model, or another version".into()));
        }
        let theta = theta as f64;
        let sizes = Sizes {
            vocab,
            layers,
            width,
            hidden,
            heads,
            key_heads,
            nope,
            rope,
            value,
            latent,
            theta,
        };
        let mut rest =
            numbers.chunks_exact(2).map(|two| from_f16(u16::from_le_bytes([two[0], two[1]])));
        let mut is_short = false;
        let model = Model::with(sizes, |count, _| {
            let mut taken: Vec<f32> = rest.by_ref().take(count).collect();
            is_short |= taken.len() < count;
            taken.resize(count, 0.0);
            taken
        });
        match (is_short, rest.len()) {
            (false, 0) => Ok(model),
            (_, left) => Err(wrong(format!("its header does not fit: {left} numbers are left"))),
        }
    }

    /// Builds a model from a function that returns each tensor, in the order of the file, by its
    /// size and its number of inputs (0 = a gain).
    pub fn with(sizes: Sizes, mut take: impl FnMut(usize, usize) -> Vec<f32>) -> Model {
        let Sizes { vocab, width, hidden, heads, key_heads, nope, rope, value, latent, .. } = sizes;
        let mut matrix = |outputs: usize, inputs: usize| take(outputs * inputs.max(1), inputs);
        let symbols = matrix(vocab, width);
        let mut layer = || {
            let first = matrix(width, 0);
            let q = matrix(heads * (nope + rope), width);
            let (k, v, latent) = if latent > 0 {
                let down = matrix(latent, width);
                let norm = matrix(latent, 0);
                let pe = matrix(rope, width);
                let up_k = matrix(heads * nope, latent);
                let up_v = matrix(heads * value, latent);
                (down, Vec::new(), Some(Latent { norm, pe, up_k, up_v }))
            } else {
                (matrix(key_heads * rope, width), matrix(key_heads * value, width), None)
            };
            Layer {
                first,
                q,
                k,
                v,
                latent,
                o: matrix(width, heads * value),
                second: matrix(width, 0),
                gate: matrix(hidden, width),
                up: matrix(hidden, width),
                down: matrix(width, hidden),
            }
        };
        let layers = (0..sizes.layers).map(|_| layer()).collect();
        let (last, out) = (matrix(width, 0), matrix(vocab, width));
        let angles = (0..MAX_TOKENS as usize * rope / 2).map(|at| {
            let (position, i) = (at / (rope / 2), at % (rope / 2));
            position as f64 * sizes.theta.powf(-2.0 * i as f64 / rope as f64)
        });
        let (cos, sin) = angles.map(|a| (a.cos() as f32, a.sin() as f32)).unzip();
        Model { sizes, symbols, layers, last, out, cos, sin }
    }

    /// Cosines and sines of the rotation at a position.
    pub fn turns(&self, position: u32) -> (&[f32], &[f32]) {
        let half = self.sizes.rope / 2;
        let at = position as usize * half;
        (&self.cos[at..at + half], &self.sin[at..at + half])
    }

    /// The model's shape for sparse policies, with this form of keys and values.
    pub fn shape(&self, form: Form, block_tokens: u32) -> Shape {
        let Sizes { heads, key_heads, nope, rope, value, latent, .. } = self.sizes;
        let (key_heads, key_dim, value_dim) = match form {
            Form::Split => (key_heads, rope, value),
            Form::Expanded => (heads, nope + rope, value),
            Form::Latent => (1, latent + rope, latent),
        };
        Shape {
            layers: self.layers.len() as u32,
            query_heads: heads as u32,
            key_heads: key_heads as u32,
            key_dim: key_dim as u32,
            value_dim: value_dim as u32,
            scale: 1.0 / ((nope + rope) as f32).sqrt(),
            kind: if form == Form::Latent { Kind::Latent } else { Kind::Split },
            block_tokens,
            max_tokens: MAX_TOKENS,
        }
    }
}
