//! Charts as SVG text: histogram, bars by layer, curves, ranked bars, heat map.
//!
//! Knows geometry alone: values come in, a drawing goes out. Colours are classes and variables of the page's style sheet, so
//! that one drawing serves light, dark and print. Drawings are 460 units wide, about a phone's width, so that text stays
//! legible when a narrow page shrinks them. Every drawing has a title and a description for those who cannot see it.

use super::digest::{percent, sig};
use std::fmt::Write;

const WIDTH: f64 = 460.0;
const LEFT: f64 = 46.0;
const RIGHT: f64 = 10.0;
const BOTTOM: f64 = 38.0;

/// Text safe inside an element or an attribute.
fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;").replace('\'', "&#39;")
}

/// A drawing under construction. Writing to a `String` cannot fail, so results of `write!` are dropped.
struct Svg {
    body: String,
    height: f64,
    top: f64,
    right: f64,
}

impl Svg {
    fn new(height: f64, top: f64, title: &str, desc: &str) -> Self {
        let mut body = String::new();
        let (title, desc) = (escape(title), escape(desc));
        let _ = write!(body, r#"<svg role="img" viewBox="0 0 {WIDTH} {height}"><title>{title}</title><desc>{desc}</desc>"#);
        Self { body, height, top, right: RIGHT }
    }

    fn finish(mut self) -> String {
        self.body.push_str("</svg>");
        self.body
    }

    /// Bottom of the plot.
    fn base(&self) -> f64 {
        self.height - BOTTOM
    }

    /// Height of `share` of the plot, 0 at the bottom.
    fn y(&self, share: f64) -> f64 {
        self.base() - share.clamp(0.0, 1.0) * (self.base() - self.top)
    }

    /// Place of `share` of the plot, 0 at the left.
    fn x(&self, share: f64) -> f64 {
        LEFT + share.clamp(0.0, 1.0) * (WIDTH - LEFT - self.right)
    }

    fn text(&mut self, x: f64, y: f64, class: &str, text: &str) {
        let _ = write!(self.body, r#"<text x="{x:.1}" y="{y:.1}" class="{class}">{}</text>"#, escape(text));
    }

    fn line(&mut self, from: (f64, f64), to: (f64, f64), class: &str) {
        let ((x1, y1), (x2, y2)) = (from, to);
        let _ = write!(self.body, r#"<line x1="{x1:.1}" y1="{y1:.1}" x2="{x2:.1}" y2="{y2:.1}" class="{class}"/>"#);
    }

    /// A filled box that tells its value when pointed at.
    fn rect(&mut self, at: (f64, f64), size: (f64, f64), class: &str, tip: &str) {
        let ((x, y), (w, h)) = (at, size);
        let _ = write!(self.body, r#"<rect x="{x:.2}" y="{y:.2}" width="{w:.2}" height="{h:.2}" class="{class}">"#);
        let _ = write!(self.body, "<title>{}</title></rect>", escape(tip));
    }

    fn y_axis(&mut self, ticks: &[(f64, String)], name: &str) {
        for (share, label) in ticks {
            let y = self.y(*share);
            self.line((LEFT, y), (WIDTH - self.right, y), "grid");
            self.text(LEFT - 6.0, y + 4.0, "tick end", label);
        }
        self.text(0.0, 12.0, "axis", name);
    }

    fn x_axis(&mut self, ticks: &[(f64, String)], name: &str) {
        let y = self.base();
        self.line((LEFT, y), (WIDTH - self.right, y), "base");
        for (share, label) in ticks {
            let x = self.x(*share);
            self.line((x, y), (x, y + 4.0), "base");
            self.text(x, y + 17.0, "tick mid", label);
        }
        self.text(WIDTH - self.right, y + 34.0, "axis end", name);
    }
}

/// A step of 1, 2 or 5 times a power of ten that cuts `range` into at most `parts`.
fn step(range: f64, parts: f64) -> f64 {
    let raw = (range / parts).max(f64::MIN_POSITIVE);
    let decade = 10f64.powf(raw.log10().floor());
    [1.0, 2.0, 5.0, 10.0].into_iter().map(|m| m * decade).find(|s| *s >= raw * (1.0 - 1e-9)).unwrap_or(decade * 10.0)
}

/// Numbered places: bars, layers, experts.
fn index_step(n: usize, parts: f64) -> usize {
    [1, 2, 4, 8, 16, 32, 64, 128].into_iter().find(|s| n as f64 / *s as f64 <= parts).unwrap_or(256)
}

/// Ticks of a linear axis from zero, as many decimals as its step needs, and the value at its end.
fn linear(max: f64, unit: &str) -> (f64, Vec<(f64, String)>) {
    let max = if max > 0.0 { max } else { 1.0 };
    let step = step(max, 5.0);
    let parts = (max / step - 1e-9).ceil().max(1.0);
    let decimals = (-step.log10().floor()).clamp(0.0, 9.0) as usize;
    let ticks = (0..=parts as usize).map(|i| (i as f64 / parts, format!("{:.decimals$}{unit}", i as f64 * step)));
    (parts * step, ticks.collect())
}

/// `10` to a whole power.
fn decade(power: i32) -> String {
    match power {
        -2..=3 => sig(10f64.powi(power), 1),
        p => {
            let digits = p.to_string().chars().map(super::digest::superscript).collect::<String>();
            format!("10{digits}")
        }
    }
}

/// Named places on the horizontal axis of a histogram.
pub(super) struct Mark<'a> {
    /// Name, as shown.
    pub(super) name: &'a str,
    /// Value, not its logarithm.
    pub(super) at: f64,
}

/// Share of tokens by the decimal logarithm of their divergence; `edges` has one more than `counts`.
pub(super) fn histogram(edges: &[f64], counts: &[f64], marks: &[Mark<'_>]) -> Option<String> {
    let total: f64 = counts.iter().sum();
    let first = counts.iter().position(|c| *c > 0.0)?;
    let last = counts.iter().rposition(|c| *c > 0.0)?;
    if edges.len() != counts.len() + 1 {
        return None;
    }
    let (low, high) = (edges[first].floor(), edges[last + 1].ceil().max(edges[first].floor() + 1.0));
    let place = |svg: &Svg, log: f64| svg.x((log - low) / (high - low));
    let mut shown: Vec<&Mark<'_>> = marks.iter().filter(|m| m.at > 0.0 && (low..=high).contains(&m.at.log10())).collect();
    shown.sort_by(|a, b| a.at.total_cmp(&b.at));
    let told: Vec<String> = marks.iter().map(|m| format!("{} {}", m.name, sig(m.at, 3))).collect();
    let desc = format!("{} tokens between {} and {} nats; {}.", total, decade(low as i32), decade(high as i32), told.join(", "));
    let top = 24.0 + 15.0 * shown.len() as f64;
    let mut svg = Svg::new(276.0, top, "Histogram of the divergence of single tokens", &desc);
    let (end, ticks) = linear(counts.iter().copied().fold(0.0, f64::max) / total * 100.0, " %");
    svg.y_axis(&ticks, "share of tokens");
    for i in first..=last {
        let share = counts[i] / total * 100.0;
        let (x0, x1, y) = (place(&svg, edges[i]), place(&svg, edges[i + 1]), svg.y(share / end));
        let tip = format!("{} to {}: {}", sig(10f64.powf(edges[i]), 2), sig(10f64.powf(edges[i + 1]), 2), percent(share / 100.0));
        svg.rect((x0 + 0.5, y), ((x1 - x0 - 1.0).max(0.5), svg.base() - y), "bar", &tip);
    }
    // Labels lie on the side where the lines of the other marks start lower, so that none is crossed.
    let leftward = shown.last().is_some_and(|m| place(&svg, m.at.log10()) > WIDTH - 90.0);
    if leftward {
        shown.reverse();
    }
    for (i, mark) in shown.iter().enumerate() {
        let (x, y) = (place(&svg, mark.at.log10()), 34.0 + 15.0 * i as f64);
        svg.line((x, y - 10.0), (x, svg.base()), "mark");
        let (dx, class) = if leftward { (-5.0, "note end") } else { (5.0, "note") };
        svg.text(x + dx, y, class, &format!("{} {}", mark.name, sig(mark.at, 3)));
    }
    let powers: Vec<i32> = (low as i32..=high as i32).collect();
    let every = index_step(powers.len(), 8.0);
    let ticks: Vec<_> = powers.iter().step_by(every).map(|p| ((*p as f64 - low) / (high - low), decade(*p))).collect();
    svg.x_axis(&ticks, "KLD, nats");
    Some(svg.finish())
}

/// What one layer shows.
pub(super) struct LayerBar {
    /// Layer index.
    pub(super) layer: usize,
    /// Height of the bar.
    pub(super) value: f64,
    /// End of the thin line above the bar.
    pub(super) p99: Option<f64>,
    /// Noise floor, a short stroke.
    pub(super) floor: Option<f64>,
}

/// Bars by layer.
pub(super) struct LayerBars<'a> {
    /// Title for those who cannot see it.
    pub(super) title: &'a str,
    /// What is measured, with its unit.
    pub(super) name: &'a str,
    /// Layers, in order.
    pub(super) bars: &'a [LayerBar],
    /// Lines of warning and failure, which also make the axis logarithmic.
    pub(super) limits: Option<(f64, f64)>,
}

/// Draws bars by layer.
pub(super) fn layer_bars(chart: &LayerBars<'_>) -> Option<String> {
    let bars = chart.bars;
    let worst = bars.iter().max_by(|a, b| a.value.total_cmp(&b.value))?;
    let desc = format!("{} layers; largest {} in layer {}.", bars.len(), sig(worst.value, 3), worst.layer);
    let mut svg = Svg::new(250.0, 26.0, chart.title, &desc);
    svg.right = if chart.limits.is_some() { 70.0 } else { RIGHT };
    let values = || bars.iter().flat_map(|b| [Some(b.value), b.p99, b.floor]).flatten();
    let most = values().fold(0.0, f64::max);
    type Scale = Box<dyn Fn(f64) -> f64>;
    let (scale, ticks): (Scale, Vec<(f64, String)>) = match chart.limits {
        Some((_, fail)) => {
            let least = bars.iter().map(|b| b.value).filter(|v| *v > 0.0).fold(fail / 1e3, f64::min);
            let (low, high) = (least.log10().floor().max(-8.0), most.max(fail * 1.01).log10().ceil());
            let every = index_step((high - low) as usize, 6.0);
            let ticks = (low as i32..=high as i32).step_by(every).map(|p| ((p as f64 - low) / (high - low), decade(p))).collect();
            (Box::new(move |v| if v > 0.0 { (v.log10() - low) / (high - low) } else { 0.0 }), ticks)
        }
        None => {
            let (end, ticks) = linear(most, "");
            (Box::new(move |v| v / end), ticks)
        }
    };
    svg.y_axis(&ticks, chart.name);
    let slot = (WIDTH - LEFT - svg.right) / bars.len() as f64;
    let width = (slot * 0.72).min(34.0);
    for (i, bar) in bars.iter().enumerate() {
        let mid = LEFT + (i as f64 + 0.5) * slot;
        let class = match chart.limits {
            Some((_, fail)) if bar.value > fail => "bar fail",
            Some((warn, _)) if bar.value > warn => "bar warn",
            _ => "bar",
        };
        let y = svg.y(scale(bar.value));
        let mut tip = format!("layer {}: {}", bar.layer, sig(bar.value, 3));
        if let Some(p99) = bar.p99.filter(|p| *p > bar.value) {
            svg.line((mid, y), (mid, svg.y(scale(p99))), "whisker");
            let _ = write!(tip, ", 99 % {}", sig(p99, 3));
        }
        svg.rect((mid - width / 2.0, y), (width, svg.base() - y), class, &tip);
        if let Some(floor) = bar.floor.filter(|f| scale(*f) > 0.0) {
            let y = svg.y(scale(floor));
            svg.line((mid - width / 2.0, y), (mid + width / 2.0, y), "floor");
        }
    }
    if let Some((warn, fail)) = chart.limits {
        for (value, class, name) in [(warn, "limit warn", "warn"), (fail, "limit fail", "fail")] {
            let y = svg.y(scale(value));
            svg.line((LEFT, y), (WIDTH - svg.right, y), class);
            svg.text(WIDTH - svg.right + 5.0, y + 4.0, &format!("note {name}"), &format!("{name} {}", sig(value, 1)));
        }
    }
    let every = index_step(bars.len(), 13.0);
    let share = |i: usize| (i as f64 + 0.5) / bars.len() as f64;
    let ticks: Vec<_> = bars.iter().enumerate().step_by(every).map(|(i, b)| (share(i), b.layer.to_string())).collect();
    svg.x_axis(&ticks, "layer");
    Some(svg.finish())
}

/// One policy of the coverage chart.
pub(super) struct Curve<'a> {
    /// Name, as shown.
    pub(super) name: &'a str,
    /// Class that gives colour and dashes.
    pub(super) class: &'a str,
    /// Share of experts held, share of routing served.
    pub(super) points: Vec<(f64, f64)>,
}

/// Share of routing served against share of experts held; `chosen` is the share that the hot set holds.
pub(super) fn curves(curves: &[Curve<'_>], target: Option<f64>, chosen: Option<f64>) -> Option<String> {
    let shown: Vec<&Curve<'_>> = curves.iter().filter(|c| !c.points.is_empty()).collect();
    if shown.is_empty() {
        return None;
    }
    let near = |c: &Curve<'_>, at: f64| c.points.iter().copied().min_by(|a, b| (a.0 - at).abs().total_cmp(&(b.0 - at).abs()));
    let told: Vec<String> = shown
        .iter()
        .filter_map(|c| near(c, chosen.unwrap_or(0.5)).map(|(x, y)| format!("{} {} at {} held", c.name, percent(y), percent(x))))
        .collect();
    let mut svg = Svg::new(300.0, 26.0, "Share of routing served by the experts held", &format!("{}.", told.join("; ")));
    let ticks = || (0..=5).map(|i| (i as f64 / 5.0, format!("{} %", i * 20))).collect::<Vec<_>>();
    svg.y_axis(&ticks(), "routing served");
    if let Some(target) = target {
        let y = svg.y(target);
        svg.line((LEFT, y), (WIDTH - RIGHT, y), "mark");
        svg.text(LEFT + 5.0, y - 4.0, "note", &format!("target {}", percent(target)));
    }
    if let Some(chosen) = chosen {
        let x = svg.x(chosen);
        svg.line((x, svg.top), (x, svg.base()), "mark");
        let (dx, class) = if chosen > 0.5 { (-5.0, "note end") } else { (5.0, "note") };
        svg.text(x + dx, svg.base() - 7.0, class, &format!("hot set {}", percent(chosen)));
    }
    for curve in &shown {
        let points: Vec<String> = curve.points.iter().map(|(x, y)| format!("{:.1},{:.1}", svg.x(*x), svg.y(*y))).collect();
        let _ = write!(svg.body, r#"<polyline points="{}" class="curve {}"/>"#, points.join(" "), curve.class);
    }
    for (i, curve) in shown.iter().enumerate() {
        let y = svg.base() - 26.0 - 18.0 * (shown.len() - 1 - i) as f64;
        svg.line((WIDTH - 118.0, y - 4.0), (WIDTH - 90.0, y - 4.0), &format!("curve {}", curve.class));
        svg.text(WIDTH - 83.0, y, "note", curve.name);
    }
    svg.x_axis(&ticks(), "experts held");
    Some(svg.finish())
}

/// A ranked bar, its label above it.
pub(super) struct Ranked {
    /// Label, left.
    pub(super) name: String,
    /// What the bar is made of, below it.
    pub(super) detail: String,
    /// Length of the bar.
    pub(super) value: f64,
}

/// Bars from left to right on a scale that ends at `most`.
pub(super) fn ranked(bars: &[Ranked], most: f64, title: &str) -> Option<String> {
    let first = bars.first()?;
    let row = 56.0;
    let desc = format!("{} components; the first is {} with {}.", bars.len(), first.name, sig(first.value, 3));
    let mut svg = Svg::new(row * bars.len() as f64, 0.0, title, &desc);
    for (i, bar) in bars.iter().enumerate() {
        let y = row * i as f64;
        let name: String = if bar.name.chars().count() > 44 {
            bar.name.chars().take(43).chain(['\u{2026}']).collect()
        } else {
            bar.name.clone()
        };
        let _ = write!(
            svg.body,
            r#"<text x="0" y="{:.1}" class="label">{}<title>{}</title></text>"#,
            y + 14.0,
            escape(&name),
            escape(&bar.name)
        );
        svg.text(WIDTH, y + 14.0, "end", &sig(bar.value, 3));
        svg.text(0.0, y + 44.0, "value", &bar.detail);
        let width = if most > 0.0 { (bar.value / most).clamp(0.0, 1.0) * WIDTH } else { 0.0 };
        svg.rect((0.0, y + 20.0), (WIDTH, 9.0), "track", &bar.name);
        svg.rect((0.0, y + 20.0), (width.max(1.0), 9.0), "bar", &sig(bar.value, 3));
    }
    Some(svg.finish())
}

/// Lower bounds of the heat map's shades, in units of the mean use of the layer's experts.
pub(super) const SHADES: [f64; 5] = [0.0, 0.5, 1.0, 2.0, 4.0];

/// Use of the experts, one row a layer.
pub(super) struct Heat<'a> {
    /// What was run.
    pub(super) name: &'a str,
    /// Layer index and uses of each of its experts, hot and most used ones first.
    pub(super) rows: &'a [(usize, Vec<f64>)],
    /// Hot experts of each row.
    pub(super) hot: &'a [Vec<usize>],
    /// The first map of a page carries the outline of the hot set, the others point at it.
    pub(super) first: bool,
}

/// Draws a heat map: shades by use over the layer's mean, the hot set outlined.
pub(super) fn heat(map: &Heat<'_>) -> Option<String> {
    let experts = map.rows.iter().map(|(_, row)| row.len()).max().filter(|n| *n > 0)?;
    let layers = map.rows.len();
    let (left, top) = (30.0, 4.0);
    let cell_w = (WIDTH - left - 2.0) / experts as f64;
    let cell_h = (cell_w * 1.4).clamp(5.0, 22.0);
    let plot = cell_h * layers as f64;
    let unused = map.rows.iter().flat_map(|(_, row)| row).filter(|c| **c == 0.0).count();
    let desc = format!(
        "{layers} layers of {experts} experts; {} in the hot set, {unused} never used.",
        map.hot.iter().map(Vec::len).sum::<usize>()
    );
    let mut svg = Svg::new(top + plot + BOTTOM, top, &format!("Use of the experts: {}", map.name), &desc);
    let mut shades = vec![String::new(); SHADES.len()];
    for (y, (_, row)) in map.rows.iter().enumerate() {
        let mean = row.iter().sum::<f64>() / row.len().max(1) as f64;
        let level = |c: f64| (c > 0.0).then(|| SHADES.iter().rposition(|s| c >= s * mean).unwrap_or(0));
        let mut x = 0;
        while x < row.len() {
            let shade = level(row[x]);
            let run = row[x..].iter().take_while(|c| level(**c) == shade).count();
            if let Some(shade) = shade {
                let _ = write!(shades[shade], "M{x} {y}.5h{run}");
            }
            x += run;
        }
    }
    let _ = write!(svg.body, r#"<g transform="translate({left} {top}) scale({cell_w:.4} {cell_h:.4})">"#);
    let _ = write!(svg.body, r#"<rect width="{experts}" height="{layers}" class="unused"/>"#);
    for (i, path) in shades.iter().enumerate().filter(|(_, p)| !p.is_empty()) {
        let _ = write!(svg.body, r#"<path d="{path}" class="heat h{i}"/>"#);
    }
    if map.first {
        let _ = write!(svg.body, r#"<path id="hot-set" d="{}" class="hot"/></g>"#, outline(map.hot, experts));
    } else {
        svg.body.push_str(r##"<use href="#hot-set"/></g>"##);
    }
    let base = top + plot;
    let every = index_step(layers, 9.0).max((14.0 / cell_h).ceil() as usize);
    for (i, (layer, _)) in map.rows.iter().enumerate().step_by(every) {
        svg.text(left - 6.0, top + (i as f64 + 0.5) * cell_h + 4.5, "tick end", &layer.to_string());
    }
    for i in (0..experts).step_by(index_step(experts, 9.0)) {
        svg.text(left + (i as f64 + 0.5) * cell_w, base + 16.0, "tick mid", &i.to_string());
    }
    svg.text(0.0, base + 33.0, "axis", "layer");
    svg.text(WIDTH - 2.0, base + 33.0, "axis end", "experts, most used first");
    Some(svg.finish())
}

/// Edges between experts inside and outside the set, neighbours joined.
fn outline(hot: &[Vec<usize>], experts: usize) -> String {
    let mut grid = vec![vec![false; experts]; hot.len()];
    for (row, ids) in grid.iter_mut().zip(hot) {
        ids.iter().filter(|e| **e < experts).for_each(|e| row[*e] = true);
    }
    let inside = |x: isize, y: isize| {
        let row = usize::try_from(y).ok().and_then(|y| grid.get(y));
        usize::try_from(x).ok().and_then(|x| row?.get(x).copied()).unwrap_or(false)
    };
    let mut path = String::new();
    let mut walk = |across: bool, lines: usize, length: usize| {
        for line in 0..=lines as isize {
            let edge = |i: isize| match across {
                true => inside(i, line - 1) != inside(i, line),
                false => inside(line - 1, i) != inside(line, i),
            };
            let mut i = 0;
            while i < length as isize {
                let run = (i..length as isize).take_while(|j| edge(*j)).count();
                if run > 0 {
                    let _ = if across { write!(path, "M{i} {line}h{run}") } else { write!(path, "M{line} {i}v{run}") };
                }
                i += run.max(1) as isize;
            }
        }
    };
    walk(true, hot.len(), experts);
    walk(false, experts, hot.len());
    path
}

/// The shades of the heat map with their meaning.
pub(super) fn heat_key() -> String {
    let names = ["never", "under \u{bd}", "\u{bd} to 1", "1 to 2", "2 to 4", "4 or more"];
    let mut svg =
        Svg::new(118.0, 0.0, "Key to the heat maps", "Shades from never used to four times the mean of the layer or more.");
    for (i, name) in names.iter().enumerate() {
        let (x, y) = (10.0 + 150.0 * (i % 3) as f64, 6.0 + 34.0 * (i / 3) as f64);
        let class = if i == 0 { "unused".to_string() } else { format!("swatch h{}", i - 1) };
        svg.rect((x, y), (22.0, 22.0), &class, name);
        svg.text(x + 30.0, y + 16.0, "note", name);
    }
    let _ = write!(svg.body, r#"<path d="M10 76h22v22h-22z" class="hot"/>"#);
    svg.text(40.0, 92.0, "note", "in the hot set");
    svg.finish()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ticks_are_one_two_or_five() {
        assert_eq!((step(1.0, 5.0), step(7.0, 5.0), step(0.011, 5.0)), (0.2, 2.0, 0.005));
        assert_eq!(linear(0.073, "").1[1].1, "0.02");
        assert_eq!((decade(-5), decade(-1)), ("10\u{207b}\u{2075}".into(), "0.1".into()));
    }

    #[test]
    fn a_lone_cell_has_four_edges_and_neighbours_share_none() {
        assert_eq!(outline(&[vec![1]], 3), "M1 0h1M1 1h1M1 0v1M2 0v1");
        assert_eq!(outline(&[vec![0, 1], vec![0, 1]], 2), "M0 0h2M0 2h2M0 0v2M2 0v2");
    }

    #[test]
    fn charts_of_nothing_or_of_broken_data_are_not_drawn() {
        assert!(histogram(&[], &[], &[]).is_none());
        assert!(histogram(&[0.0, 1.0], &[0.0], &[]).is_none());
        assert!(histogram(&[0.0], &[1.0], &[]).is_none());
        assert!(layer_bars(&LayerBars { title: "", name: "", bars: &[], limits: None }).is_none());
        assert!(curves(&[], None, None).is_none());
        assert!(ranked(&[], 1.0, "").is_none());
        assert!(heat(&Heat { name: "", rows: &[], hot: &[], first: true }).is_none());
    }
}
