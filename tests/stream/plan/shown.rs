//! Experts, layers on the CPU, and the description of plans.

use crate::plan::setup::{GIB, MIB, Setup, check, layer, residencies, unit};
use kvtier::base::status::Status;
use kvtier::stream::plan::{ComputeLocation, Links, Plan, Residency};
use kvtier::stream::units::{NONE, Role, Unit};

const LINKS: Links = Links { disk: 2_000_000_000, device: 8_000_000_000, processor: 0 };

/// Layers with experts, an embedding, a norm and a head.
fn mixture(layers: usize, experts: usize) -> Setup {
    let mut units: Vec<Unit> =
        vec![unit("embedding".to_string(), Role::Embedding, NONE, NONE, 300 * MIB)];
    for i in 0..layers {
        units.push(layer(i, 40 * MIB));
        for e in 0..experts {
            let name = format!("layer {i} expert {e}");
            units.push(unit(name, Role::Expert, i as u32, e as u32, 8 * MIB));
        }
    }
    units.push(unit("norm".to_string(), Role::Norm, NONE, NONE, MIB / 64));
    units.push(unit("head".to_string(), Role::Head, NONE, NONE, 300 * MIB));
    let mut setup = Setup::of(units);
    setup.facts.experts = experts as u32;
    setup.facts.experts_used = 6;
    setup.links = LINKS;
    setup
}

fn bytes_of(plan: &Plan, setup: &Setup, home: Residency, role: Role) -> u64 {
    let units = setup.units.units.iter().zip(&plan.residencies);
    units.filter(|(u, h)| **h == home && u.role == role).map(|(u, _)| u.image_bytes).sum()
}

#[test]
fn experts_share_memory_left_by_dense_units() {
    let mut setup = mixture(16, 64);
    let dense = 16 * 40 * MIB + 300 * MIB + MIB / 64;
    // Room for all that is dense, and a quarter of the experts.
    let (device, host) = (dense + 256 * 8 * MIB, 300 * MIB + 64 * MIB + 384 * 8 * MIB);
    setup.room(device, host);
    setup.plan_options.staging_bytes = 64 * MIB;
    let plan = setup.plan();
    check(&setup, &plan, device, host);
    assert_eq!((plan.slots, plan.expert_slots, plan.expert_slot_bytes), (0, 256, 8 * MIB));
    assert_eq!(bytes_of(&plan, &setup, Residency::Host, Role::Expert), 384 * 8 * MIB);
    assert_eq!(bytes_of(&plan, &setup, Residency::Host, Role::Embedding), 300 * MIB);
    assert!(plan.on_processor[0] && plan.residencies[0] == Residency::Host);
    let forecast = plan.forecast.unwrap();
    // Six of 64 in each of 16 layers, a quarter of them there; of the rest 3 of 8 in memory.
    let expected = 16.0 * 6.0 * 8.0 * MIB as f64 * 0.75;
    assert!((forecast.device_bytes as f64 - expected).abs() < 1e6, "{forecast:?}");
    assert!((forecast.disk_bytes as f64 - expected * 0.625).abs() < expected * 0.02);
    // Nothing is fetched before the router has spoken: no overlap.
    assert!(forecast.pass_ns >= forecast.disk_ns, "{forecast:?}");

    // With less, dense units pass through slots and experts have what they need at least.
    setup.room(900 * MIB, host);
    let plan = setup.plan();
    check(&setup, &plan, 900 * MIB, host);
    assert!(plan.slots == 2 && plan.slot_bytes == 40 * MIB && plan.expert_slots >= 7, "{plan:?}");
    assert!(bytes_of(&plan, &setup, Residency::Device, Role::Head) > 0, "the head fits no slot");
    setup.plan_options.expert_slots = Some(3);
    assert_eq!(setup.error().status(), Status::Budget);
    setup.plan_options.expert_slots = Some(20);
    assert_eq!(setup.plan().expert_slots, 20);
    setup.plan_options.expert_slots = None;
    setup.room(300 * MIB, host);
    assert_eq!(setup.error().status(), Status::Budget);

    // With more than enough nothing moves.
    setup.room(20 * GIB, host);
    let plan = setup.plan();
    assert_eq!((plan.slots, plan.expert_slots, plan.device_bytes), (0, 0, dense + 1024 * 8 * MIB));
    assert_eq!(plan.forecast.unwrap().device_bytes, 0);
}

#[test]
fn cpu_experts_are_read_from_the_file() {
    let mut setup = mixture(8, 16);
    setup.plan_options.compute = Some(ComputeLocation::Host);
    let host = 8 * 40 * MIB + 600 * MIB + MIB + 64 * 8 * MIB;
    setup.room(0, host);
    let plan = setup.plan();
    check(&setup, &plan, 0, host);
    assert_eq!((plan.slots, plan.expert_slots), (0, 64));
    let forecast = plan.forecast.unwrap();
    assert_eq!((forecast.disk_bytes, forecast.device_bytes), (8 * 6 * 8 * MIB / 2, 0));
    // An embedding that would leave no room for slots passes through them.
    setup.room(0, 700 * MIB);
    let plan = setup.plan();
    check(&setup, &plan, 0, 700 * MIB);
    assert_eq!(bytes_of(&plan, &setup, Residency::File, Role::Embedding), 300 * MIB);
}

#[test]
fn last_layers_run_on_the_cpu() {
    let mut setup = mixture(8, 2);
    setup.plan_options.processor_layers = 3;
    setup.links.processor = 40_000_000_000;
    setup.room(600 * MIB, 2 * GIB);
    let plan = setup.plan();
    check(&setup, &plan, 600 * MIB, 2 * GIB);
    for (i, unit) in setup.units.units.iter().enumerate() {
        let layers = matches!(unit.role, Role::Layer | Role::Expert);
        let theirs = layers && unit.layer >= 5;
        assert_eq!(plan.on_processor[i], theirs || unit.role == Role::Embedding, "{i}");
    }
    let forecast = plan.forecast.unwrap();
    // 3 layers with all their experts, of which the model uses both.
    assert_eq!(forecast.compute_ns, 3 * 56 * MIB * 1_000 / 40_000);
    setup.room(600 * MIB, 100 * MIB);
    assert!(setup.error().message().contains("processor_layers"));
}

#[test]
fn cpu_is_suggested_if_it_is_faster() {
    let mut setup = Setup::layers(&[40 * MIB; 8], 200 * MIB, GIB);
    setup.links = LINKS;
    assert!(setup.plan().processor_hint(&setup.inputs()).is_empty());
    setup.links.processor = 40_000_000_000;
    let plan = setup.plan();
    let hints = plan.processor_hint(&setup.inputs());
    assert_eq!((residencies(&plan), hints.len()), ((3, 5, 0), 5));
    // Five times the rate: a fifth of the time.
    assert!(hints.iter().all(|hint| hint.in_place && hint.send_ns / 5 == hint.in_place_ns));
    setup.links.processor = 4_000_000_000;
    assert!(plan.processor_hint(&setup.inputs()).iter().all(|hint| !hint.in_place));
}

/// A process has its cgroup for itself; a machine has other programs.
#[test]
fn reserve_of_a_cgroup_limit_is_smaller_than_that_of_a_machine() {
    let reserve = |total: u64, is_limited: bool| {
        let mut setup = Setup::layers(&[MIB; 8], 0, total);
        setup.plan_options.host_reserve_bytes = None;
        setup.plan_options.kv_bytes = Some(0);
        setup.memory.host_is_limited = is_limited;
        let plan = setup.plan();
        let figure = plan.figures.iter().find(|figure| figure.name == "host reserve");
        figure.expect("a reserve").bytes
    };
    for (total, machine, limit) in [
        (128 * MIB, 32 * MIB, 32 * MIB),
        (512 * MIB, 128 * MIB, 64 * MIB),
        (8 * GIB, 2 * GIB, GIB / 2),
        (48 * GIB, 6 * GIB, 3 * GIB),
        (200 * GIB, 6 * GIB, 6 * GIB),
    ] {
        assert_eq!((reserve(total, false), reserve(total, true)), (machine, limit), "{total}");
    }
}

#[test]
fn description_totals_are_consistent() {
    let mut setup = mixture(8, 4);
    setup.memory.device_free_bytes = 2 * GIB;
    setup.memory.host_free_bytes = 8 * GIB;
    setup.memory.host_total_bytes = 16 * GIB;
    setup.memory.lockable_bytes = 200 * MIB;
    setup.facts.layers = 8;
    setup.facts.kv_heads = 4;
    setup.facts.key_dim = 64;
    setup.facts.value_dim = 64;
    setup.facts.context = 100_000;
    setup.plan_options.workspace_bytes = 700 * MIB;
    setup.plan_options.host_ceiling_bytes = Some(3 * GIB);
    setup.plan_options.layer_compute_ns = 1_000_000;
    let plan = setup.plan();
    check(&setup, &plan, 2 * GIB, 3 * GIB);
    assert_eq!(plan.pinned_bytes, 200 * MIB);
    let figure = |name: &str| plan.figures.iter().find(|f| f.name == name).unwrap();
    // The context is not the model's, which is long, but the usual one.
    assert_eq!(figure("device kv").bytes, 8 * 4 * 128 * 2 * 4096);
    assert_eq!(figure("host reserve").bytes, 4 * GIB);
    assert_eq!(figure("host budget").bytes, 3 * GIB);
    let device = 2 * GIB - 256 * MIB - 700 * MIB - 8 * 4 * 128 * 2 * 4096;
    assert_eq!(figure("device budget").bytes, device);
    let text = plan.text(&setup.inputs());
    for words in
        ["= device budget", "- device kv", "embedding host, in place", "tokens/s", "pinned"]
    {
        assert!(text.contains(words), "{words} in\n{text}");
    }
    is_read_by_programs(&setup, &plan);
}

fn is_read_by_programs(setup: &Setup, plan: &Plan) {
    let json: serde_json::Value = serde_json::from_str(&plan.json(&setup.inputs())).unwrap();
    assert_eq!(json["figures"].as_array().unwrap().len(), plan.figures.len());
    assert_eq!(json["residency"]["host"]["units"], 1);
    assert_eq!(json["forecast"]["pass_ns"], plan.forecast.unwrap().pass_ns);
    let runs = json["runs"].as_array().unwrap();
    assert_eq!(
        (runs[0]["residency"].as_str(), runs[0]["on_processor"].as_bool()),
        (Some("host"), Some(true))
    );
}

#[test]
fn pass_time_depends_on_bandwidth() {
    let mut setup = Setup::layers(&[40 * MIB; 8], 200 * MIB, 250 * MIB);
    let plan = setup.plan();
    assert!(plan.forecast.is_none());
    let error = plan.what_if(&setup.inputs(), Links::default()).unwrap_err();
    assert!(error.message().contains("h2d=13,disk=3.3"), "{error}");
    let slow = plan.what_if(&setup.inputs(), Links::parse("h2d=1,disk=1").unwrap()).unwrap();
    setup.links = Links { disk: 1_000_000_000, ..Links::default() };
    let fast = plan.what_if(&setup.inputs(), Links::parse("h2d=2").unwrap()).unwrap();
    assert_eq!(slow.device_bytes, fast.device_bytes);
    assert!(fast.pass_ns < slow.pass_ns && fast.tokens_per_s() > slow.tokens_per_s());
}
