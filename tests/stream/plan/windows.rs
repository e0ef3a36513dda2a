//! KV of layers with window attention.

use crate::plan::setup::{GIB, MIB, Setup};
use kvtier::stream::plan::ComputeLocation;

/// 26 layers, of which 22 see 512 tokens back.
fn gemma(context: u32) -> Setup {
    let mut setup = Setup::layers(&[MIB; 26], 0, 64 * GIB);
    setup.facts.layers = 26;
    (setup.facts.window, setup.facts.windowed_layers) = (512, 22);
    (setup.facts.kv_heads, setup.facts.key_dim, setup.facts.value_dim) = (1, 256, 256);
    setup.plan_options.context = context;
    setup
}

fn kv(setup: &Setup, name: &str) -> (u64, String) {
    let plan = setup.plan();
    let found = plan.figures.iter().find(|figure| figure.name == name).expect("a figure");
    (found.bytes, found.why.clone())
}

#[test]
fn window_layers_keep_only_their_window() {
    let token = 2 * 256 * 2;
    let (bytes, why) = kv(&gemma(32_768), "host kv");
    assert_eq!(bytes, token * (4 * 32_768 + 22 * 512));
    assert!(why.contains("4 layers x 32768 tokens") && why.contains("22 layers x 512"), "{why}");
    // A context that is shorter than the window.
    assert_eq!(kv(&gemma(100), "host kv").0, token * 26 * 100);
    let mut several = gemma(1024);
    several.plan_options.sequences = 3;
    assert_eq!(kv(&several, "host kv").0, 3 * token * (4 * 1024 + 22 * 512));
    let mut said = gemma(1024);
    said.plan_options.kv_bytes = Some(77);
    assert_eq!(kv(&said, "host kv"), (77, "as you set it".to_string()));
}

#[test]
fn unknown_window_layers_keep_everything() {
    let mut setup = gemma(4096);
    setup.facts.windowed_layers = 0;
    let (bytes, why) = kv(&setup, "host kv");
    assert_eq!(bytes, 26 * 2 * 256 * 2 * 4096);
    assert!(why.contains("512 tokens, but which is not known"), "{why}");
    setup.plan_options.context = 512;
    assert!(!kv(&setup, "host kv").1.contains("not known"));
}

#[test]
fn cpu_and_device_kv_both_get_their_bytes() {
    // The model does not record which of the last layers have a window: each side may have the
    // others.
    for away in 0..=26u64 {
        let mut setup = gemma(4096);
        setup.memory.device_free_bytes = GIB;
        setup.plan_options.compute = Some(ComputeLocation::Device);
        setup.plan_options.processor_layers = away as u32;
        let least = |layers: u64| {
            let whole = layers.min(4);
            2 * 256 * 2 * (whole * 4096 + (layers - whole) * 512)
        };
        let found = |name: &str| {
            let plan = setup.plan();
            plan.figures.iter().find(|figure| figure.name == name).map_or(0, |f| f.bytes)
        };
        assert_eq!((found("host kv"), found("device kv")), (least(away), least(26 - away)));
    }
}
