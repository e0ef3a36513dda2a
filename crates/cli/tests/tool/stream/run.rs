//! `kvtier stream run`: passes, their pictures, checksums, and too little memory.

use super::page::words_of;
use super::*;

fn run(path: &Path, args: &[&str]) -> ToolOutput {
    stream("run", &[path], args)
}

#[test]
fn passes_read_units_that_are_not_resident() {
    let dir = Scratch::created("tool-run");
    let path = gguf(&dir, &dense());
    let output = json(&run(&path, &["--host", "8M", "--passes", "4", "--json"]).fine());
    let passes = output["passes"].as_array().expect("passes");
    assert_eq!(passes.len(), 4);
    // A unit that is not resident is read at most once a pass, plus the read-ahead after the last.
    // It is not read if it is still in a slot: at the start, and if readers are slow.
    let streamed = number(&output, "/plan/residency/file/bytes");
    let slots = number(&output, "/plan/slots/count") * number(&output, "/plan/slots/slot_bytes");
    let read: u64 = passes.iter().map(|pass| number(pass, "/read_bytes")).sum();
    assert!(streamed > 4 << 20 && read <= 4 * streamed + slots, "{read} {streamed}");
    assert!(read >= 3 * streamed, "{read} {streamed}");
    for pass in passes {
        assert_eq!(number(pass, "/acquires"), 16, "{pass}");
        let parts = ["/compute_ns", "/wait_read_ns", "/wait_copy_ns", "/wait_slot_ns"];
        let sum: u64 = parts.iter().map(|part| number(pass, part)).sum();
        assert!(number(pass, "/compute_ns") > 0 && sum <= number(pass, "/pass_ns"), "{pass}");
        assert_eq!(number(pass, "/copied_bytes"), 0);
    }
    let text = run(&path, &["--host", "8M", "--passes", "2"]).fine();
    for words in ["host budget", "I/O engine", "steady pass: ", "% compute", "disk: "] {
        assert!(text.contains(words), "{words}: {text}");
    }
}

#[test]
fn all_units_are_resident_if_they_fit() {
    let dir = Scratch::created("tool-fits");
    let path = gguf(&dir, &dense());
    let output = json(&run(&path, &["--host", "64M", "--passes", "2", "--json"]).fine());
    assert_eq!(number(&output, "/plan/residency/file/units"), 0);
    let least: u64 = dense().gguf().iter().map(Made::bytes).sum();
    let most = std::fs::metadata(&path).expect("found").len();
    assert!((least..=most).contains(&number(&output, "/load_bytes")), "{output}");
    let passes = output["passes"].as_array().expect("passes");
    assert!(passes.iter().all(|pass| number(pass, "/read_bytes") == 0), "{output}");
}

#[test]
fn compute_time_follows_the_argument() {
    let dir = Scratch::created("tool-compute");
    let path = gguf(&dir, &dense());
    let args = ["--host", "8M", "--passes", "2", "--compute", "3ms", "--json"];
    let output = json(&run(&path, &args).fine());
    for pass in output["passes"].as_array().expect("passes") {
        assert!(number(pass, "/compute_ns") >= 12 * 3_000_000, "{pass}");
    }
    assert_eq!(number(&output, "/plan/forecast/compute_ns"), 12 * 3_000_000);
}

#[test]
fn a_device_is_simulated() {
    let dir = Scratch::created("tool-simulated");
    let path = gguf(&dir, &dense());
    let args = ["--device", "6M", "--device-link", "500M", "--host", "24M", "--compute", "100us"];
    for more in [&[][..], &["--ring"]] {
        let output = json(&run(&path, &[&args[..], more, &["--json"]].concat()).fine());
        assert_eq!(output["plan"]["compute"], "device");
        let expected = if more.is_empty() { "tiered" } else { "ring" };
        assert_eq!(output["plan"]["mode"], expected);
        for pass in output["passes"].as_array().expect("passes") {
            assert!(number(pass, "/copied_bytes") > 4 << 20, "{pass}");
        }
        assert_eq!(number(&output, "/device_ceiling"), 500_000_000);
    }
    // In place a unit takes whole pieces of 2 MiB: there are eight, two of which are slots.
    let args = ["--device", "16M", "--in-place", "--device-link", "500M", "--host", "24M"];
    let output = json(&run(&path, &[&args[..], &["--json"]].concat()).fine());
    assert_eq!(number(&output, "/plan/device_bytes"), 16 << 20);
    for pass in output["passes"].as_array().expect("passes") {
        assert!(number(pass, "/copied_bytes") > 0, "{pass}");
    }
    let args = ["--device", "6M", "--device-link", "500M", "--host", "24M", "--compute", "100us"];
    let text = run(&path, &args).fine();
    assert!(text.contains("% of the 476.8 MiB/s"), "{text}");
    run(&path, &["--device-link", "1G"]).fails(2, "--device <DEVICE>");
}

#[test]
fn the_number_of_experts_follows_the_model() {
    let dir = Scratch::created("tool-moe");
    let path = gguf(&dir, &experts());
    let output = json(&run(&path, &["--host", "4M", "--passes", "5", "--json"]).fine());
    for pass in output["passes"].as_array().expect("passes") {
        // Two experts of each of 4 layers; the layers, and the four other units.
        assert_eq!(number(pass, "/acquires"), 4 * 2 + 4 + 4, "{pass}");
        assert_eq!(number(pass, "/expert_hits") + number(pass, "/expert_misses"), 8);
    }
    assert_eq!(output["layers"].as_array().expect("layers").len(), 4);
}

#[test]
fn all_read_methods_return_the_same_bytes() {
    let dir = Scratch::created("tool-ways");
    let path = gguf(&dir, &dense());
    for args in [&["--buffered"][..], &["--mapped"], &["--in-place"], &["--readers", "3"]] {
        let args = [&["--host", "8M", "--verify", "always", "--passes", "2"], args].concat();
        // Each method compares with the checksums that the previous one recorded.
        assert!(run(&path, &args).fine().contains("steady pass"), "{args:?}");
    }
    run(&path, &["--buffered", "--mapped"]).fails(2, "cannot be used with");
    run(&path, &["--readers", "100000"]).fails(1, "reader threads");
}

#[test]
fn pictures_are_well_formed() {
    let dir = Scratch::created("tool-page");
    let sizes = [("dense", dense()), ("moe", experts())];
    for (name, sizes) in &sizes {
        // Names are read from files.
        let name = format!("<{name}>&\"x");
        let mut tensors = sizes.gguf();
        tensors.push(Made::new("</text>&\"<script>.weight", "F16", &[1 << 12], 1));
        let path = write_gguf(&dir.0, &name, &tensors, &sizes.metadata(), 1).remove(0);
        let (svg, html) = (dir.0.join("a.svg"), dir.0.join("a b.html"));
        let mut tool = tool();
        tool.arg("run").arg(&path).args(["--host", "4M", "--passes", "3", "--svg"]).arg(&svg);
        let output =
            ToolOutput::of(tool.arg("--html").arg(&html).output().expect("it starts")).fine();
        let read = |path: &Path| std::fs::read_to_string(path).expect("written");
        let picture = read(&svg);
        let title = format!("{name}.gguf: where the time of passes 2 and 3 of 3 went");
        for words in [words_of(&picture), words_of(&read(&html))] {
            let parts = ["pass 3", "layer 3 (", "</text>&\"<script>", "compute: ", " ms"];
            for part in parts.into_iter().chain([title.as_str()]) {
                assert!(words.contains(part), "{part}: {words}");
            }
        }
        // The page has the terminal's values, and no external resources.
        let page = words_of(&read(&html));
        let steady = output.lines().find(|line| line.starts_with("steady pass")).expect("it");
        assert!(page.contains(steady) && page.contains("host budget"), "{page}");
        for outside in ["http://", "https://", "src=", "<script"] {
            let found = read(&html).replace("http://www.w3.org/2000/svg", "");
            assert!(!found.contains(outside), "{outside}");
        }
        assert!(picture.starts_with("<svg ") && picture.matches("<rect ").count() > 20);
    }
    let nowhere = dir.0.join("nowhere/a.html");
    let nowhere = nowhere.to_str().expect("text");
    let path = gguf(&dir, &Sizes::default());
    run(&path, &["--html", nowhere]).fails(1, &format!("{nowhere}: No such file"));
}

#[test]
fn a_sidecar_detects_a_changed_byte() {
    let dir = Scratch::created("tool-verify");
    let path = gguf(&dir, &dense());
    let sidecar = dir.0.join("model.gguf.kvtsum");
    run(&path, &["--host", "8M"]).fine();
    assert!(!sidecar.exists(), "no sidecar was requested");
    let args = ["--host", "8M", "--verify", "first", "--passes", "2"];
    run(&path, &args).fine();
    let noted = std::fs::read(&sidecar).expect("kept");
    run(&path, &args).fine();
    assert!(std::fs::read(&sidecar).expect("kept") == noted, "it was written anew");

    // Changes a byte of a layer, and restores the file's times: else it would be another file.
    let before = std::fs::metadata(&path).expect("found").modified().expect("a time");
    let mut bytes = std::fs::read(&path).expect("ours");
    let at = bytes.len() / 2;
    bytes[at] ^= 1;
    std::fs::write(&path, &bytes).expect("written");
    let file = std::fs::File::options().write(true).open(&path).expect("found");
    file.set_modified(before).expect("set");
    let output = run(&path, &args);
    assert_eq!(output.code, Some(1), "{} {}", output.out, output.error);
    assert!(output.error.contains("KVT_E_CORRUPT"), "{}", output.error);
    // Checksums are verified on request only.
    run(&path, &["--host", "8M"]).fine();
    // A damaged sidecar is replaced.
    bytes[at] ^= 1;
    std::fs::write(&path, &bytes).expect("written");
    file.set_modified(before).expect("set");
    std::fs::write(&sidecar, &noted[..noted.len() / 2]).expect("written");
    run(&path, &args).fine();
    assert!(std::fs::read(&sidecar).expect("kept") == noted);
}

#[test]
fn errors_name_the_minimum_memory() {
    let dir = Scratch::created("tool-least");
    let path = gguf(&dir, &dense());
    let output = run(&path, &["--host", "1M"]);
    output.fails(1, "KVT_E_BUDGET");
    let (_, rest) = output.error.split_once("needs at least ").expect("how much");
    let least: u64 = rest.split(' ').next().expect("one").parse().expect("a number");
    assert!(least > 1 << 20);
    run(&path, &["--host", &least.to_string(), "--passes", "1"]).fine();
    run(&path, &["--host", &(least - 4096).to_string()]).fails(1, "KVT_E_BUDGET");
    run(&path, &["--host", "8M", "--slots", "1000"]).fails(1, "set fewer slots");
}

#[test]
fn conflicting_options_are_reported() {
    let dir = Scratch::created("tool-sense");
    let path = gguf(&dir, &Sizes::default());
    for (args, words) in [
        (&["--passes", "0"][..], "0 is not in 1..=1000000"),
        (&["--compute", "5"], "'5' is not a time, such as 5ms"),
        (&["--compute", "2000000s"], "more than an hour"),
        (&["--ring", "--placement", "first"], "cannot be used with"),
        (&["--verify", "sometimes"], "first, always"),
        (&["--host", ""], "does not begin with a number"),
    ] {
        run(&path, args).fails(2, words);
    }
}
