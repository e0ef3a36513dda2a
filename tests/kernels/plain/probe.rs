//! The emulated device behaves like a device, and detects wrong kernels.

use kvtier::base::half::{to_bf16, to_f16};
use kvtier::device::call::Call;
use kvtier::device::cuda::kernels::Step;
use kvtier::meta::dtype::Dtype;

use super::{Chance, at, emulated, to};

fn launch(name: &'static str, threads: u32, call: &Call) -> Result<(), String> {
    let (grid, block) = ([1, 1, 1], [threads, 1, 1]);
    let step = Step { module: 0, name, grid, block, shared_bytes: 0 };
    // SAFETY: the caller keeps what the call names.
    unsafe { emulated::launch(&step, call) }
}

#[repr(align(16))]
struct Aligned([u16; 256]);

#[test]
fn matrix_products_follow_published_layouts() {
    for (dtype, half) in [(Dtype::F16, to_f16 as fn(f32) -> u16), (Dtype::Bf16, to_bf16)] {
        let mut chance = Chance::new(11);
        // Small whole numbers: sums are exact.
        let mut matrix =
            || -> Vec<f32> { (0..256).map(|_| (chance.number() * 9.0).round()).collect() };
        let (a, b, mut out) = (matrix(), matrix(), vec![f32::NAN; 128]);
        let halves = |numbers: &[f32]| {
            let mut all = Aligned([0; 256]);
            all.0.iter_mut().zip(numbers).for_each(|(to, &x)| *to = half(x));
            all
        };
        let (keys, values) = (halves(&a), halves(&b));
        let mut call = Call {
            dtype: dtype.code(),
            keys: at(&keys.0),
            values: at(&values.0),
            out: to(&mut out),
            ..Call::default()
        };
        launch("probe_product", 32, &call).expect("sound");
        let product = |i: usize| (0..16).map(|k| a[i / 8 * 16 + k] * b[k * 8 + i % 8]).sum::<f32>();
        let wanted: Vec<f32> = (0..128).map(product).collect();
        assert_eq!(out, wanted);
        call.flags = 1;
        launch("probe_product", 32, &call).expect("it ends");
        assert_ne!(out, wanted, "copies complete before the wait");
    }
}

#[test]
fn warp_lanes_agree() {
    let mut out = vec![[u32::MAX; 4]; 64];
    launch("probe_lanes", 64, &Call { out: to(&mut out), ..Call::default() }).expect("sound");
    let thirds = (0..32).filter(|lane| lane % 3 == 0).fold(0, |mask, lane| mask | 1_u32 << lane);
    for (thread, found) in out.into_iter().enumerate() {
        let lane = thread as u32 % 32;
        let group = lane / 8 * 8;
        let last = match lane {
            0..16 => lane ^ 3,
            16 => 16,
            _ => lane - 1,
        };
        let wanted = [(1..=lane + 1).sum(), thirds, (group..group + 8).sum(), last];
        assert_eq!(found, wanted, "thread {thread}");
    }
}

#[test]
fn emulator_detects_wrong_kernels() {
    let mut out = vec![0_u32; 64];
    let mut ask = |flags: u32| {
        let result =
            launch("probe_wrong", 64, &Call { flags, out: to(&mut out), ..Call::default() });
        (result, out.clone())
    };
    for flags in [1, 2, 3] {
        let words = ask(flags).0.expect_err("a divergent thread");
        assert!(words.contains("lane") || words.contains("threads"), "{words}");
    }
    assert_eq!(ask(4), (Ok(()), vec![0xDBDB_DBDB; 64]), "unwritten shared memory");
    let (result, found) = ask(5);
    assert_eq!((result, found), (Ok(()), (0..64).rev().collect()));
    let none = launch("no_kernel", 1, &Call::default()).expect_err("no such kernel");
    assert!(none.contains("no_kernel"), "{none}");
}
