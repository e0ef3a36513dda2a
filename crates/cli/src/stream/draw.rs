//! Parts of pictures, as SVG text.

use std::fmt::Write;
use std::ops::Range;

use crate::lab::plot::escape;

/// Round steps of an axis, at least so far from each other.
pub fn step(rough: f64) -> f64 {
    let unit = 10f64.powf(rough.log10().floor());
    let step = [1.0, 2.0, 5.0, 10.0].map(|s| s * unit).into_iter().find(|s| *s >= rough);
    step.unwrap_or(10.0 * unit)
}

/// Words at a place.
pub fn label(out: &mut String, (x, y): (f64, f64), anchor: &str, words: &str) {
    let words = escape(words);
    // Writing to a string cannot fail, here and below.
    let _ = write!(
        out,
        "<text class=\"k\" x=\"{x:.1}\" y=\"{y:.1}\" text-anchor=\"{anchor}\">{words}</text>"
    );
}

/// Down the picture.
pub fn line(out: &mut String, class: &str, x: f64, y: Range<f64>) {
    let _ = write!(
        out,
        "<line class=\"{class}\" x1=\"{x:.1}\" x2=\"{x:.1}\" y1=\"{}\" y2=\"{}\"/>",
        y.start, y.end
    );
}

/// Across the picture.
pub fn band(out: &mut String, width: f64, y: Range<f64>) {
    let (top, height) = (y.start, y.end - y.start);
    let _ = write!(
        out,
        "<rect class=\"band\" y=\"{top:.1}\" width=\"{width}\" height=\"{height:.1}\"/>"
    );
}

/// Stretches of one kind; what they are is said where a pointer rests on them.
pub fn blocks(out: &mut String, all: &[(f64, f64)], y: Range<f64>, colour: &str, words: &str) {
    let (top, height) = (y.start, y.end - y.start);
    let _ = write!(out, "<g fill=\"{colour}\"><title>{}</title>", escape(words));
    for (from, to) in all {
        let width = (to - from).max(0.5);
        let _ = write!(
            out,
            "<rect x=\"{from:.2}\" y=\"{top:.1}\" width=\"{width:.2}\" height=\"{height:.1}\"/>"
        );
    }
    out.push_str("</g>");
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn steps_are_round_and_few() {
        for (rough, expected) in [(0.7, 1.0), (1.0, 1.0), (13.0, 20.0), (410.0, 500.0)] {
            assert_eq!(step(rough), expected, "{rough}");
        }
    }
}
