//! Tests of the spec grammar.

use super::*;
use proptest::prelude::*;

#[test]
fn nested_specs_and_typed_parameters_are_read() {
    let spec =
        Spec::parse(" qos( inner = s3fifo(small=10%) , strict=true,n=4GiB,t=5ms ) ").unwrap();
    let mut r = Reader::new(&spec);
    let inner = r.spec("inner").unwrap().unwrap();
    assert_eq!(inner.name, "s3fifo");
    assert_eq!(Reader::new(inner).f64("small", 0.0, 0.0..=1.0).unwrap(), 0.1);
    assert!(r.bool("strict", false).unwrap());
    assert_eq!(r.bytes("n", 0).unwrap(), 4 << 30);
    assert_eq!(r.duration_ns("t", 0).unwrap(), 5_000_000);
    assert_eq!(r.u64("absent", 9, 0..=10).unwrap(), 9);
    r.finish().unwrap();
}

#[test]
fn names_may_start_with_a_digit() {
    assert_eq!(Spec::parse("2q(kin=25%)").unwrap().name, "2q");
    let spec = Spec::parse("qos(inner=2q(kin=25%))").unwrap();
    assert_eq!(Reader::new(&spec).spec("inner").unwrap().unwrap().name, "2q");
    assert_eq!(Spec::parse("lru-k(k=2)").unwrap().name, "lru-k");
}

#[test]
fn errors_carry_the_offset_and_a_suggestion() {
    for (text, offset) in
        [("", 0), ("lru(", 4), ("lru(a=)", 6), ("lru)x", 3), ("lru(a=1,a=2)", 8), ("a(b=\"x)", 7)]
    {
        let error = Spec::parse(text).unwrap_err();
        assert_eq!(error.detail().unwrap().offset, Some(offset), "{text}: {error}");
    }
    let spec = Spec::parse("arc(alhpa=1)").unwrap();
    let mut r = Reader::new(&spec);
    let _ = r.f64("alpha", 0.0, 0.0..=1.0).unwrap();
    let error = r.finish().unwrap_err();
    assert!(error.message().contains("'alpha'"), "{error}");
    assert_eq!(error.detail().unwrap().offset, Some(4));
}

#[test]
fn numbers_out_of_range_are_refused() {
    let bad = |text: &str| {
        let spec = Spec::parse(text).unwrap();
        Reader::new(&spec).u64("n", 0, 1..=10).unwrap_err().status()
    };
    assert_eq!(bad("x(n=0)"), Status::Spec);
    assert_eq!(bad("x(n=11)"), Status::Spec);
    assert_eq!(bad("x(n=1.5)"), Status::Spec);
    assert_eq!(bad("x(n=-1)"), Status::Spec);
    assert_eq!(bad("x(n=1GiB)"), Status::Spec);
    assert_eq!(bad("x(n=word)"), Status::Spec);
    assert!(Spec::parse("x(n=1e999)").is_err());
    // "nan" is a word, and a word is not a number.
    assert_eq!(bad("x(n=nan)"), Status::Spec);
    assert!(Spec::parse("x(n=-nan)").is_err());
}

#[test]
fn every_error_has_its_offset_in_the_message_and_as_a_number() {
    let read = |text: &str| -> Result<()> {
        let spec = Spec::parse(text)?;
        let mut r = Reader::new(&spec);
        r.u64("n", 0, 1..=10)?;
        r.f64("f", 0.0, 0.0..=1.0)?;
        r.bytes("b", 0)?;
        r.duration_ns("t", 0)?;
        r.bool("yes", false)?;
        r.choice("c", &["auto", "cell"])?;
        r.spec("s")?;
        r.text("w")?;
        r.finish()
    };
    for (text, offset, words) in [
        ("x(n=11)", 2, "from 1 to 10"),
        ("x(n=1GiB)", 2, "without a unit"),
        ("x(n=2x)", 2, "without a unit"),
        ("x(n=word)", 2, "'n' at offset 2 takes a number"),
        ("x(f=2)", 2, "0 to 1"),
        ("x(f=10s)", 2, "or in %"),
        ("x(b=5)", usize::MAX, ""),
        ("x(b= 5Gib)", 6, "'GiB'"),
        ("x(t=10sec)", 6, "'s'"),
        ("x(t=10KiB)", 2, "ns, us, ms, s, m, h, d"),
        ("x(t=-1s)", 2, "whole numbers"),
        ("x(yes=1)", 2, "one of true, false"),
        ("x(yes=true(a))", 2, "one of true, false"),
        ("x( yes = treu )", 9, "'true'"),
        ("x(c=cel)", 4, "'cell'"),
        ("x(s=3)", 2, "a name"),
        ("x(w=3)", 2, "a text"),
        ("x(3)", 2, "key=value"),
        ("x(m=3)", 2, "'n'"),
        ("x(n=1,n=2)", 6, "twice"),
        ("x(n=1", 5, "expected"),
        ("x(a=b(a=b(a=b(a=b(a=b(a=b(a=b(a=b(a=b))))))))", 32, "deeper"),
    ] {
        let Err(error) = read(text) else {
            assert_eq!(offset, usize::MAX, "{text}");
            continue;
        };
        assert_eq!(error.detail().unwrap().offset, Some(offset as u64), "{text}: {error}");
        assert!(error.message().contains(&format!("at offset {offset}")), "{text}: {error}");
        assert!(error.message().contains(words), "{text}: {error}");
    }
    let spec = Spec::parse("fifo(k=3)").unwrap();
    assert!(Reader::new(&spec).finish().unwrap_err().message().contains("takes no arguments"));
    // Every unit in messages can be parsed.
    assert!(UNITS.iter().all(|unit| scale(unit).is_some()));
}

#[test]
fn too_long_too_deep_and_too_wide_specs_are_rejected() {
    assert_eq!(Spec::parse(&"a".repeat(5000)).unwrap_err().status(), Status::Limit);
    let deep = format!("{}a{}", "a(x=".repeat(20), ")".repeat(20));
    assert_eq!(Spec::parse(&deep).unwrap_err().status(), Status::Limit);
    let wide = format!("a({})", vec!["1"; 100].join(","));
    assert_eq!(Spec::parse(&wide).unwrap_err().status(), Status::Limit);
}

fn any_spec() -> impl Strategy<Value = String> {
    let word = "[a-z0-9][a-z0-9_-]{0,5}".prop_filter("not a number with a unit", |w| {
        !w.as_bytes()[0].is_ascii_digit() || w.chars().nth(1).is_some_and(|c| c == 'q')
    });
    let leaf = prop_oneof![
        word.clone(),
        (-1000i32..1000).prop_map(|n| format!("{}", f64::from(n) / 8.0)),
        (0u32..1000).prop_map(|n| format!("{n}MiB")),
        "[ -~]{0,8}".prop_map(|t| format!("{:?}", t.replace(['"', '\\'], ""))),
    ];
    let args = proptest::collection::vec((word.clone(), leaf), 0..4);
    (word, args).prop_map(|(name, args)| {
        let mut seen = Vec::new();
        let args: Vec<String> = args
            .into_iter()
            .filter(|(k, _)| {
                !seen.contains(k) && {
                    seen.push(k.clone());
                    true
                }
            })
            .map(|(k, v)| format!("{k}={v}"))
            .collect();
        if args.is_empty() { name } else { format!("{name}({})", args.join(", ")) }
    })
}

proptest! {
    #[test]
    fn canonical_form_is_a_fixed_point(text in any_spec()) {
        let once = Spec::parse(&text).unwrap().to_string();
        let twice = Spec::parse(&once).unwrap().to_string();
        prop_assert_eq!(once, twice);
    }

    #[test]
    fn no_text_panics(text in "\\PC{0,64}") {
        if let Err(error) = Spec::parse(&text) {
            let offset = error.detail().unwrap().offset.unwrap() as usize;
            prop_assert!(offset <= text.len());
        }
    }
}
