//! `kvtier stream plan`, for this machine and others, and with files that are not models.

use super::*;

fn plan(files: &[&Path], args: &[&str]) -> ToolOutput {
    stream("plan", files, args)
}

#[test]
fn a_plan_accounts_for_every_unit() {
    let dir = Scratch::created("tool-plan");
    let path = gguf(&dir, &dense());
    let args = ["--host", "8M", "--context", "16", "--disk", "1G"];
    let text = plan(&[&path], &args).fine();
    for words in ["16 units", "host budget", "slots: 2 x", "bound by the disk"] {
        assert!(text.contains(words), "{words}: {text}");
    }
    let output = json(&plan(&[&path], &[&args[..], &["--json"]].concat()).fine());
    let (resident, streamed) =
        (number(&output, "/residency/host/units"), number(&output, "/residency/file/units"));
    assert_eq!(resident + streamed, 16);
    assert!(resident > 1 && streamed > 1, "{output}");
    assert!(number(&output, "/host_bytes") <= 8 << 20);
    // 12 layers x 2 heads x (64 + 64) numbers x 2 bytes x 16 tokens.
    let figures = output["figures"].as_array().expect("figures");
    let kv = figures.iter().find(|figure| figure["name"] == "host kv").expect("KV");
    assert_eq!(number(kv, "/bytes"), 12 * 2 * 128 * 2 * 16);
    // At 1 GB/s a byte takes a nanosecond.
    let moved = number(&output, "/forecast/disk_bytes");
    assert!(number(&output, "/forecast/disk_ns").abs_diff(moved) <= 100, "{output}");
    assert_eq!(output["forecast"]["binding"], "disk");
}

#[test]
fn a_plan_is_made_for_another_machine() {
    let dir = Scratch::created("tool-device");
    let path = gguf(&dir, &dense());
    let args = ["--device", "264M", "--device-link", "2G", "--host", "64M", "--disk", "1G"];
    let more = ["--context", "16", "--what-if", "h2d=1,disk=4", "--json"];
    let output = json(&plan(&[&path], &[&args[..], &more[..]].concat()).fine());
    assert_eq!(output["compute"], "device");
    assert!(
        number(&output, "/residency/device/units") > 0
            && number(&output, "/residency/host/units") > 0
    );
    // Nothing is read from disk, so the device link is the bottleneck: half the bandwidth, twice
    // the time.
    assert_eq!(output["forecast"]["binding"], "device");
    let (fast, slow) =
        (number(&output, "/forecast/device_ns"), number(&output, "/what_if/device_ns"));
    assert!(slow.abs_diff(2 * fast) <= 100, "{fast} {slow}");
    let text = plan(&[&path], &[&args[..], &more[..4]].concat()).fine();
    assert!(text.contains("over h2d=1,disk=4:\nforecast: "), "{text}");
    assert!(text.contains("for a device"), "{text}");
    let args = ["--device", "280M", "--in-place", "--host", "64M", "--context", "16", "--json"];
    let bytes = number(&json(&plan(&[&path], &args).fine()), "/device_bytes");
    assert!(bytes > 0 && bytes % (2 << 20) == 0, "{bytes}");
}

#[test]
fn the_disk_is_measured_on_request() {
    let dir = Scratch::created("tool-measure");
    let path = gguf(&dir, &dense());
    let args = ["--host", "8M", "--context", "16", "--json"];
    assert!(json(&plan(&[&path], &args).fine())["forecast"].is_null());
    let output = json(&plan(&[&path], &[&args[..], &["--measure"]].concat()).fine());
    assert!(number(&output, "/forecast/disk_ns") > 0, "{output}");
}

#[test]
fn placements_and_slots_follow_the_arguments() {
    let dir = Scratch::created("tool-place");
    let path = gguf(&dir, &dense());
    let home_of_first = |placement: &str| {
        let args = ["--host", "9M", "--context", "16", "--placement", placement, "--json"];
        let output = json(&plan(&[&path], &args).fine());
        let runs = output["runs"].as_array().expect("runs").clone();
        // Layers follow the embedding and the frequencies.
        let of = |unit: u64| {
            let holds =
                |run: &&Value| number(run, "/first") <= unit && unit <= number(run, "/last");
            runs.iter().find(holds).expect("it")["residency"].as_str().expect("text").to_string()
        };
        (of(2), of(13))
    };
    assert_eq!(home_of_first("first"), ("host".into(), "file".into()));
    assert_eq!(home_of_first("last"), ("file".into(), "host".into()));
    let args = ["--host", "9M", "--context", "16", "--slots", "3", "--json"];
    assert_eq!(number(&json(&plan(&[&path], &args).fine()), "/slots/count"), 3);
}

#[test]
fn all_forms_of_a_model_have_plans() {
    let sizes = Sizes { layers: 4, ..Sizes::default() };
    let dir = Scratch::created("tool-forms");
    let all = write_gguf(&dir.0, "split", &sizes.gguf(), &sizes.metadata(), 3);
    let all: Vec<&Path> = all.iter().map(PathBuf::as_path).collect();
    let of_first = plan(&all[..1], &["--host", "1G", "--json"]).fine();
    assert_eq!(plan(&all, &["--host", "1G", "--json"]).fine(), of_first);
    // Four layers, the embedding, frequencies, the norm, the head.
    assert_eq!(number(&json(&of_first), "/residency/host/units"), 8);

    let dir = Scratch::created("tool-shards");
    let index = write_safetensors(&dir.0, &sizes.safetensors(false), &sizes.config(), 3);
    let of_index = plan(&[&index], &["--host", "1G", "--json"]).fine();
    assert_eq!(plan(&[&dir.0], &["--host", "1G", "--json"]).fine(), of_index);
    assert_eq!(number(&json(&of_index), "/residency/host/units"), 7);

    let dir = Scratch::created("tool-experts");
    let output = json(
        &plan(&[&gguf(&dir, &experts())], &["--host", "4M", "--context", "16", "--json"]).fine(),
    );
    assert_eq!(number(&output, "/residency/file/experts"), 32);
    assert!(number(&output, "/expert_slots/count") >= 2);
}

#[test]
fn files_that_are_not_models_are_refused() {
    let dir = Scratch::created("tool-hostile");
    let model = std::fs::read(gguf(&dir, &dense())).expect("ours");
    let file = |name: &str, bytes: &[u8]| {
        let path = dir.0.join(name);
        std::fs::write(&path, bytes).expect("written");
        path
    };
    let empty_dir = dir.0.join("nothing");
    std::fs::create_dir(&empty_dir).expect("made");
    let mut many = model.clone();
    many[8..16].copy_from_slice(&u64::MAX.to_le_bytes());
    for (path, words) in [
        (file("empty.gguf", b""), "the file is empty"),
        (file("note.txt", b"hello\n"), "too short"),
        (file("cut.gguf", &model[..model.len() / 2]), "cut.gguf"),
        (file("head.gguf", &model[..300]), "head.gguf"),
        (file("many.gguf", &many), "many.gguf"),
        (file("long.safetensors", &[0xff; 64]), "cut off, or no model file"),
        (file("model.safetensors.index.json", b"{\"weight_map\": {\"a\": \"b\"}}"), "b"),
        (dir.0.join("absent.gguf"), "No such file"),
        (empty_dir, "has no model files"),
        ("/dev/zero".into(), "a device, pipe or socket"),
    ] {
        let name = path.file_name().expect("one").to_string_lossy().into_owned();
        for command in ["plan", "run"] {
            let output = stream(command, &[&path], &[]);
            output.fails(1, words);
            assert!(output.error.starts_with("kvtier: KVT_E_"), "{name}: {}", output.error);
            assert_eq!(output.error.lines().count(), 1, "{name}: {}", output.error);
        }
    }
}

#[test]
fn invalid_options_are_reported() {
    let dir = Scratch::created("tool-wrong");
    let path = gguf(&dir, &Sizes::default());
    for (args, words) in [
        (&["--host", "8Q"][..], "units are B, K, M, G, T"),
        (&["--host", "G"], "does not begin with a number"),
        (&["--host", "1e3"], "'e3' in '1e3'"),
        (&["--host", "1.2.3G"], "does not begin with a number"),
        (&["--host", "99999999T"], "is above 2^60"),
        (&["--host", "99999999999999999999999999999999999999999"], "is above 2^60"),
        (&["--disk", "0"], "the rate '0' is below"),
        (&["--disk", "3.3GB/h"], "'GB/h' in '3.3GB/h'"),
        (&["--disk", "1G", "--measure"], "cannot be used with"),
        (&["--device-link", "13G"], "--device <DEVICE>"),
        (&["--in-place"], "--device <DEVICE>"),
        (&["--context=-1"], "invalid value '-1' for '--context"),
        (&["--slots", "many"], "invalid value 'many'"),
        (&["--placement", "middle"], "interleaved, first, last"),
        (&["--hots", "8G"], "'--host'"),
    ] {
        plan(&[&path], args).fails(2, words);
    }
    plan(&[], &[]).fails(2, "<FILES>...");
    plan(&[&path], &["--what-if", "gpu=3"]).fails(1, "unknown link \"gpu\", known are h2d");
    plan(&[&path], &["--what-if", ""]).fails(1, "such as h2d=13");
    let unknown = ["--host", "200K", "--context", "1", "--what-if", "h2d=3"];
    plan(&[&path], &unknown).fails(1, "set it, as in");
}

#[test]
fn a_closed_pipe_is_not_a_failure() {
    let dir = Scratch::created("tool-pipe");
    let path = gguf(&dir, &Sizes { layers: 3000, hidden: 8, ffn: 4, ..Sizes::default() });
    let mut tool = tool();
    let tool = tool.arg("plan").arg(&path).args(["--host", "1M", "--context", "1", "--json"]);
    let (reader, writer) = std::io::pipe().expect("a pipe");
    drop(reader);
    let output = ToolOutput::of(tool.stdout(writer).output().expect("the tool starts"));
    assert_eq!((output.code, output.error.as_str()), (Some(0), ""));
}
