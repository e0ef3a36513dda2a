//! Checks that HTML pages are well-formed.

/// Elements without an end tag.
const VOID: [&str; 1] = ["meta"];

/// Fails if elements are not nested properly, an attribute has no
/// quotes, or there is an invalid tag; returns the visible text.
pub fn words_of(page: &str) -> String {
    let (mut open, mut words, mut rest) = (Vec::new(), String::new(), page);
    while let Some(at) = rest.find('<') {
        let (before, after) = rest.split_at(at);
        words += before;
        let (tag, behind) = after[1..].split_once('>').expect("a tag ends");
        rest = behind;
        if tag.starts_with('!') {
            continue;
        }
        let name: String = tag.chars().take_while(|c| !c.is_whitespace()).collect();
        if let Some(name) = name.strip_prefix('/') {
            assert_eq!(open.pop().as_deref(), Some(name), "{tag}");
            continue;
        }
        attributes(tag);
        let name = name.trim_end_matches('/').to_string();
        if tag.ends_with('/') || VOID.contains(&name.as_str()) {
            continue;
        }
        if name == "style" {
            rest = &rest[rest.find("</style>").expect("a style ends")..];
        }
        open.push(name);
    }
    assert!(open.is_empty(), "{open:?} do not end");
    assert!(!words.contains("NaN") && !page.contains("\"NaN") && !page.contains("inf\""));
    words.replace("&lt;", "<").replace("&gt;", ">").replace("&quot;", "\"").replace("&amp;", "&")
}

fn attributes(tag: &str) {
    let quotes = tag.matches('"').count();
    assert_eq!(quotes % 2, 0, "{tag}");
    let outside: String = tag.split('"').step_by(2).collect();
    assert_eq!(outside.matches('=').count() * 2, quotes, "{tag}");
    assert!(!outside.contains('<'), "{tag}");
}
