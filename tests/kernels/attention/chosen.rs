//! Selection of kernels for latent rows.

use kvtier::base::status::Status;
use kvtier::device::call::{Call, Kind};
use kvtier::device::cuda::kernels::steps;

use crate::attention::data::{Problem, Shape};

fn latent(queries: usize, tokens: usize, heads: usize) -> Shape {
    Shape { dims: (576, 512), is_latent: true, ..Shape::new(queries, tokens, heads, 1) }
}

/// Devices with less shared memory get other kernels; below a minimum there are none.
#[test]
fn latent_kernels_adapt_to_shared_memory() {
    let problem = Problem::new(latent(3, 70, 2), 5);
    let at = problem.call(Kind::Prefill).queries;
    let call =
        Call { out: at, out_stride: 2048, out_head_stride: 1024, ..problem.call(Kind::Prefill) };
    let lists = Call { count: 1, index: at, counts: at, numbers: at, ..call };
    let lists = Call { scratch: at, scratch_bytes: lists.line_bytes(), ..lists };
    for (kilobytes, name) in [(227, "latent_"), (163, "latent_"), (99, "latent_small_"), (64, "")] {
        for call in [call, lists] {
            let mut found = Vec::new();
            match steps(&call, kilobytes << 10, &mut found) {
                Ok(()) => {
                    let last = found.last().expect("some");
                    let is_small = last.name.starts_with("latent_small_");
                    assert!(last.name.starts_with(name) && !name.is_empty(), "{last:?}");
                    assert_eq!(is_small, kilobytes == 99);
                    assert!(last.shared_bytes <= kilobytes << 10, "{last:?}");
                }
                Err(error) => {
                    assert!(name.is_empty() && error.status() == Status::Unsupported, "{error}");
                    assert!(error.message().contains("the device has 65536"), "{error}");
                }
            }
        }
    }
}

#[test]
fn tiled_kernels_need_many_rows_of_one_dtype() {
    let problem =
        Problem::new(Shape { dims: (576, 512), is_latent: true, ..Shape::new(1, 64, 128, 1) }, 1);
    let at = problem.call(Kind::Decode).queries;
    let good = Call {
        out: at,
        out_stride: 1 << 18,
        out_head_stride: 2048,
        scratch: at,
        scratch_bytes: 1 << 30,
        ..problem.call(Kind::Decode)
    };
    let first = |call: Call, kilobytes: u32| {
        let mut found = Vec::new();
        steps(&call, kilobytes << 10, &mut found).expect("sound");
        assert!(found.iter().all(|step| step.shared_bytes <= kilobytes << 10));
        (found[0].name, found[0].grid[2])
    };
    assert_eq!(first(good, 227), ("latent_decode_f16", 2));
    assert_eq!(first(good, 99), ("latent_decode_small_f16", 4));
    assert_eq!(first(good, 64), ("decode_f16_8", 16));
    for (other, name) in [
        (Call { query_heads: 32, ..good }, "latent_decode_small_f16"),
        (Call { query_heads: 15, ..good }, "decode_f16_8"),
        (Call { other_dtype: 3, ..good }, "decode_f16_8"),
        (Call { dtype: 3, ..good }, "decode_bf16_8"),
        (Call { dtype: 3, other_dtype: 3, ..good }, "latent_decode_bf16"),
        (Call { numbers: at, flags: 2, ..good }, "decode_f16_8"),
        (Call { values: at + 1024, ..good }, "decode_f16_8"),
        (Call { query_head_stride: 1160, ..good }, "decode_f16_8"),
    ] {
        assert_eq!(first(other, 227).0, name, "{other:?}");
    }
}
