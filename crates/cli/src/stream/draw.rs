//! Elements of pictures as SVG text.

use std::fmt::Write;
use std::ops::Range;

use crate::lab::plot::escape;

/// A text.
pub fn label(out: &mut String, (x, y): (f64, f64), anchor: &str, words: &str) {
    let words = escape(words);
    // Writing to a string cannot fail, here and below.
    let _ = write!(
        out,
        "<text class=\"k\" x=\"{x:.1}\" y=\"{y:.1}\" text-anchor=\"{anchor}\">{words}</text>"
    );
}

/// A vertical line.
pub fn line(out: &mut String, class: &str, x: f64, y: Range<f64>) {
    let _ = write!(
        out,
        "<line class=\"{class}\" x1=\"{x:.1}\" x2=\"{x:.1}\" y1=\"{}\" y2=\"{}\"/>",
        y.start, y.end
    );
}

/// A horizontal band over the whole width.
pub fn band(out: &mut String, width: f64, y: Range<f64>) {
    let (top, height) = (y.start, y.end - y.start);
    let _ = write!(
        out,
        "<rect class=\"band\" y=\"{top:.1}\" width=\"{width}\" height=\"{height:.1}\"/>"
    );
}

/// Rectangles of one colour, with a tooltip.
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
