//! Which tensor gets which format: ordered rules on canonical ids, and the limits that readers of the artifact set.
//!
//! A profile is data (`profiles/precision/*.toml`); [`decide`] is a pure function from rules and shapes to a table. It must
//! not know files, names in files or engines. The limits are those of the engines that read compressed-tensors: all experts
//! of a layer share one scheme, projections that engines fuse share one scheme, and some tensors are never quantized.

use crate::ids::{Component, LayerId, Part, Role, TensorId};
use crate::quant::format::{self, Bits, Format, Group, Zero};
use serde::Deserialize;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fmt;

/// Why rules cannot be understood.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum PrecisionError {
    /// No built-in profile of this name.
    #[error("there is no precision profile `{name}`")]
    Unknown {
        /// What was asked for.
        name: String,
    },
    /// A profile that is not of the expected form.
    #[error("precision profile `{name}`: {reason}")]
    Malformed {
        /// Name or path of the profile.
        name: String,
        /// What the parser said.
        reason: String,
    },
    /// A pattern that no canonical id can match.
    #[error("pattern `{pattern}` {reason}")]
    Pattern {
        /// The pattern.
        pattern: String,
        /// What is wrong with it.
        reason: &'static str,
    },
    /// An override without `=`.
    #[error("override `{text}` is not of the form PATTERN=FORMAT")]
    Override {
        /// What was given.
        text: String,
    },
    /// A format that does not exist.
    #[error("`{text}` is no format: {reason}")]
    Format {
        /// What was given.
        text: String,
        /// What the parser said.
        reason: String,
    },
}

impl PrecisionError {
    /// What the user can do about it.
    pub fn hint(&self) -> Option<String> {
        Some(match self {
            PrecisionError::Unknown { .. } => format!("profiles are {}, or the path of a TOML file", Profile::names().join(", ")),
            PrecisionError::Malformed { .. } => {
                "a profile is `about = \"..\"` and tables `[[rule]]` with `match` and `format`".into()
            }
            PrecisionError::Pattern { .. } | PrecisionError::Override { .. } => {
                "for example `layers.*.attn.o=int8:g64`; `moe inspect --tensors` lists the ids".into()
            }
            PrecisionError::Format { .. } => {
                "formats are source, int4 and int8, with a group such as int4:g64, and zero points such as int4:g64:asym".into()
            }
        })
    }
}

/// A pattern on canonical ids. `*` stands for one or more characters other than a dot, `**` for one or more characters of any
/// kind; everything else stands for itself, and the whole id must match. So `layers.*.attn.*` is every attention projection,
/// `layers.*.router` every router but no shared expert's gate, and `layers.3.**` everything in layer 3.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Pattern(String);

impl Pattern {
    /// Checks that every character can occur in an id.
    pub fn new(text: &str) -> Result<Self, PrecisionError> {
        let refuse = |reason| Err(PrecisionError::Pattern { pattern: text.into(), reason });
        if text.is_empty() {
            return refuse("is empty");
        }
        if !text.chars().all(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || "._*".contains(c)) {
            return refuse("has a character that no id contains; allowed are a-z, 0-9, `.`, `_`, `*` and `**`");
        }
        if text.contains("***") {
            return refuse("has more than two stars in a row");
        }
        Ok(Self(text.into()))
    }

    /// Whether the whole of `id` matches.
    pub fn matches(&self, id: &str) -> bool {
        matches(self.0.as_bytes(), id.as_bytes())
    }
}

impl fmt::Display for Pattern {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// Follows all ways through the pattern at once, so that no pattern takes longer than its length times that of the text. Bit `i`
/// says that what was read of the pattern matches the first `i` characters; ids are far shorter than 127.
fn matches(pattern: &[u8], text: &[u8]) -> bool {
    if text.len() > 127 {
        return false;
    }
    let (mut reached, mut rest) = (1u128, pattern);
    while let Some((&c, tail)) = rest.split_first() {
        let mut next = 0u128;
        if c == b'*' {
            let any = tail.first() == Some(&b'*');
            rest = if any { &tail[1..] } else { tail };
            for (i, &t) in text.iter().enumerate() {
                if (reached | next) >> i & 1 == 1 && (any || t != b'.') {
                    next |= 2 << i;
                }
            }
        } else {
            rest = tail;
            let mut left = reached;
            while left != 0 {
                let i = left.trailing_zeros() as usize;
                left &= left - 1;
                if text.get(i) == Some(&c) {
                    next |= 2 << i;
                }
            }
        }
        if next == 0 {
            return false;
        }
        reached = next;
    }
    reached >> text.len() & 1 == 1
}

/// Tensors that match get this format.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rule {
    /// Which ids.
    pub pattern: Pattern,
    /// Which format.
    pub format: Format,
}

impl Rule {
    /// Reads an override, `PATTERN=FORMAT`.
    pub fn parse(text: &str) -> Result<Self, PrecisionError> {
        let (pattern, format) = text.split_once('=').ok_or_else(|| PrecisionError::Override { text: text.into() })?;
        Ok(Self { pattern: Pattern::new(pattern.trim())?, format: parse_format(format.trim())? })
    }
}

impl fmt::Display for Rule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}={}", self.pattern, self.format)
    }
}

fn parse_format(text: &str) -> Result<Format, PrecisionError> {
    text.parse()
        .map_err(|e: <Format as std::str::FromStr>::Err| PrecisionError::Format { text: text.into(), reason: e.to_string() })
}

/// Ordered rules under a name; what no rule matches keeps its source format.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Profile {
    /// Name, or path of the file.
    pub name: String,
    /// One line for people.
    pub about: String,
    /// First match wins.
    pub rules: Vec<Rule>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct ProfileFile {
    about: String,
    #[serde(default)]
    rule: Vec<RuleFile>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RuleFile {
    r#match: String,
    format: String,
}

const BUILT_IN: &[(&str, &str)] = &[
    ("mixed", include_str!("../../profiles/precision/mixed.toml")),
    ("compact", include_str!("../../profiles/precision/compact.toml")),
    ("speq", include_str!("../../profiles/precision/speq.toml")),
    ("fast", include_str!("../../profiles/precision/fast.toml")),
    ("int8", include_str!("../../profiles/precision/int8.toml")),
];

impl Profile {
    /// Names of the built-in profiles, the default first.
    pub fn names() -> Vec<&'static str> {
        BUILT_IN.iter().map(|(name, _)| *name).collect()
    }

    /// A built-in profile.
    pub fn built_in(name: &str) -> Result<Self, PrecisionError> {
        match BUILT_IN.iter().find(|(n, _)| *n == name) {
            Some((name, text)) => Self::parse(name, text),
            None => Err(PrecisionError::Unknown { name: name.into() }),
        }
    }

    /// Reads the TOML form.
    pub fn parse(name: &str, text: &str) -> Result<Self, PrecisionError> {
        let malformed = |reason: String| PrecisionError::Malformed { name: name.into(), reason };
        let file: ProfileFile = toml::from_str(text).map_err(|e| malformed(e.message().to_string()))?;
        let rule = |r: RuleFile| Ok(Rule { pattern: Pattern::new(&r.r#match)?, format: parse_format(&r.format)? });
        let rules: Result<Vec<Rule>, PrecisionError> = file.rule.into_iter().map(rule).collect();
        Ok(Self { name: name.into(), about: file.about, rules: rules.map_err(|e| malformed(e.to_string()))? })
    }

    /// The same with zero points in every four-bit format; eight bits gain nothing from them, and embeddings never get them.
    pub fn with_zero_points(mut self) -> Self {
        for rule in &mut self.rules {
            if matches!(rule.format, Format::Int { bits: Bits::Four, .. }) {
                rule.format = rule.format.with_zero(Zero::Point);
            }
        }
        self
    }

    /// The same with another group size in every grouped format.
    pub fn with_group(mut self, group: usize) -> Self {
        for rule in &mut self.rules {
            if let Format::Int { group: Group::Of(n), .. } = &mut rule.format {
                *n = group;
            }
        }
        self
    }
}

/// What is done with one tensor, and why it is not what was asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Decision {
    /// What the rules asked for.
    pub asked: Format,
    /// What it gets.
    pub format: Format,
    /// Why the two differ.
    pub reason: Option<Reason>,
}

/// Why a tensor does not get what a rule asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Reason {
    /// The group size does not divide its columns.
    Columns {
        /// Columns of the tensor.
        cols: usize,
    },
    /// Another member of its bundle needs a finer format.
    Bundle(Bundle),
    /// The output head is the embedding.
    Tied,
    /// Never quantized, or only when an override names it.
    Kept,
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Reason::Columns { cols } => write!(f, "{cols} columns"),
            Reason::Bundle(b) => write!(f, "{} share one scheme", b.name()),
            Reason::Tied => f.write_str("tied to the head"),
            Reason::Kept => f.write_str("always kept"),
        }
    }
}

/// Tensors of a layer that readers need in one scheme.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Bundle {
    /// All projections of all experts.
    Experts,
    /// Query, key and value projections.
    Qkv,
    /// Gate and up of a dense block.
    Mlp,
    /// Gate and up of the shared expert.
    Shared,
    /// The two latent down-projections.
    Latent,
}

impl Bundle {
    fn of(role: Role) -> Option<Self> {
        use Role::*;
        match role {
            ExpertGate | ExpertUp | ExpertDown => Some(Bundle::Experts),
            Q | K | V => Some(Bundle::Qkv),
            MlpGate | MlpUp => Some(Bundle::Mlp),
            SharedGate | SharedUp => Some(Bundle::Shared),
            QA | KvA => Some(Bundle::Latent),
            _ => None,
        }
    }

    fn name(self) -> &'static str {
        match self {
            Bundle::Experts => "all experts of a layer",
            Bundle::Qkv => "q, k and v",
            Bundle::Mlp => "gate and up of a dense MLP",
            Bundle::Shared => "gate and up of a shared expert",
            Bundle::Latent => "q_a and kv_a",
        }
    }

    fn example(self) -> &'static str {
        match self {
            Bundle::Experts => "layers.*.experts.**",
            Bundle::Qkv => "layers.*.attn.*",
            Bundle::Mlp => "layers.*.mlp.*",
            Bundle::Shared => "layers.*.shared.*",
            Bundle::Latent => "layers.*.attn.*_a",
        }
    }
}

/// Formats of a whole model, with everything that is wrong or risky about them.
#[derive(Clone, Debug, Default)]
pub struct Decisions {
    table: HashMap<TensorId, Decision>,
    /// What makes the rules unusable for this model.
    pub problems: Vec<String>,
    /// What the user should know before the work begins.
    pub warnings: Vec<String>,
}

impl Decisions {
    /// What is done with a tensor.
    pub fn get(&self, id: TensorId) -> Decision {
        self.table.get(&id).copied().unwrap_or(Decision { asked: Format::Source, format: Format::Source, reason: None })
    }

    /// The format a tensor gets.
    pub fn format(&self, id: TensorId) -> Format {
        self.get(id).format
    }
}

/// What may be done with a tensor.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Allowed {
    ByProfile,
    ByOverride,
    Never(Reason),
}

fn allowed(id: TensorId, shape: &[usize], tied: bool) -> Allowed {
    match id.role {
        _ if id.part == Part::Bias || shape.len() != 2 || id.role.component() == Component::Norms => Allowed::Never(Reason::Kept),
        Role::SharedRouter => Allowed::Never(Reason::Kept),
        Role::Embed | Role::Head if tied => Allowed::Never(Reason::Tied),
        Role::Router | Role::QA | Role::KvA | Role::KvB => Allowed::ByOverride,
        _ => Allowed::ByProfile,
    }
}

/// How fine a format is, to choose the finest of a bundle; only formats of one ladder are compared.
fn fineness(format: Format) -> (usize, usize) {
    match format {
        Format::Int { bits, group: Group::Of(n), .. } => (bits.count(), usize::MAX / n.max(1)),
        Format::Int { bits, group: Group::Channel, .. } => (bits.count(), usize::MAX),
        Format::Source => (usize::MAX, 0),
    }
}

/// Applies `overrides`, then the rules of `profile`, to the tensors of a model. `tied`: the head is the embedding.
pub fn decide(tensors: &[(TensorId, Vec<usize>)], tied: bool, overrides: &[Rule], profile: &Profile) -> Decisions {
    let mut out = Decisions::default();
    let mut used = vec![(false, false); overrides.len()];
    let mut by_override: BTreeSet<(&'static str, &'static str)> = BTreeSet::new();
    let mut bundles: BTreeMap<(LayerId, Bundle), Vec<TensorId>> = BTreeMap::new();
    for (id, shape) in tensors {
        let name = id.to_string();
        let allowed = allowed(*id, shape, tied);
        let mut asked = None;
        for (rule, used) in overrides.iter().zip(&mut used).filter(|(r, _)| r.pattern.matches(&name)) {
            used.0 = true;
            if rule.format == Format::Source || !matches!(allowed, Allowed::Never(_)) {
                used.1 = true;
                asked = asked.or(Some(rule.format));
            }
        }
        if let Some(format) = asked.filter(|f| *f != Format::Source)
            && allowed == Allowed::ByOverride
        {
            let what = if id.role == Role::Router { "router" } else { "latent projection" };
            by_override.insert((id.role.name(), what));
            asked = Some(format);
        }
        let ruled = profile.rules.iter().find(|r| r.pattern.matches(&name)).map_or(Format::Source, |r| r.format);
        let decision = match (asked, allowed) {
            (Some(asked), _) => fitted(asked, shape),
            // Readers that take quantized embeddings ignore zero points of theirs.
            (None, Allowed::ByProfile) if id.role == Role::Embed => fitted(ruled.with_zero(Zero::Middle), shape),
            (None, Allowed::ByProfile) => fitted(ruled, shape),
            (None, Allowed::ByOverride) => kept(ruled, shape, Reason::Kept),
            (None, Allowed::Never(reason)) => kept(ruled, shape, reason),
        };
        if id.part == Part::Weight
            && let (Some(layer), Some(bundle)) = (id.layer, Bundle::of(id.role))
        {
            bundles.entry((layer, bundle)).or_default().push(*id);
        }
        out.table.insert(*id, decision);
    }
    for (rule, (matched, applied)) in overrides.iter().zip(used) {
        if !matched {
            out.problems.push(format!("`--set {rule}` matches no tensor of this model"));
        } else if !applied {
            out.problems.push(format!(
                "`--set {rule}` matches only tensors that are never quantized (norms, biases, scalar gates, tied embeddings)"
            ));
        }
    }
    for (role, what) in by_override {
        out.warnings.push(format!(
            "`{role}` is quantized because `--set` asks for it; a {what} is small, and its error misroutes or compounds"
        ));
    }
    unite(&mut out, &bundles);
    out
}

/// A tensor that keeps its source format; only for a matrix is that worth a reason.
fn kept(ruled: Format, shape: &[usize], reason: Reason) -> Decision {
    let reason = (ruled != Format::Source && shape.len() == 2).then_some(reason);
    Decision { asked: Format::Source, format: Format::Source, reason }
}

fn fitted(asked: Format, shape: &[usize]) -> Decision {
    let cols = shape.last().copied().unwrap_or(0);
    let format = format::fit(asked, cols);
    Decision { asked, format, reason: (format != asked).then_some(Reason::Columns { cols }) }
}

/// Gives every bundle the finest format that one of its members needs.
fn unite(out: &mut Decisions, bundles: &BTreeMap<(LayerId, Bundle), Vec<TensorId>>) {
    let mut split: BTreeMap<Bundle, Vec<(LayerId, String)>> = BTreeMap::new();
    for ((layer, bundle), ids) in bundles {
        let decisions: Vec<Decision> = ids.iter().map(|&id| out.get(id)).collect();
        let mut asked: Vec<String> = decisions.iter().map(|d| d.asked.to_string()).collect();
        asked.sort();
        asked.dedup();
        if asked.len() > 1 {
            split.entry(*bundle).or_default().push((*layer, asked.join(" and ")));
            continue;
        }
        let Some(finest) = decisions.iter().map(|d| d.format).max_by_key(|&f| fineness(f)) else { continue };
        for (id, decision) in ids.iter().zip(decisions).filter(|(_, d)| d.format != finest) {
            out.table.insert(*id, Decision { format: finest, reason: Some(Reason::Bundle(*bundle)), ..decision });
        }
    }
    for (bundle, layers) in split {
        let (LayerId(layer), formats) = &layers[0];
        let more = if layers.len() > 1 { format!(" and in {} more layers", layers.len() - 1) } else { String::new() };
        out.problems.push(format!(
            "{} must share one format, but layer {layer}{more} would have {formats}; name all of them, e.g. `{}`",
            bundle.name(),
            bundle.example()
        ));
    }
}
