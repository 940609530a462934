//! Rotations of positions, made once: a walk through many layers begins the same batches again and again.

use crate::model::rope;
use crate::model::spec::RopeSpec;
use std::collections::HashMap;
use std::ops::Range;

/// Lengths of which rotations are kept.
const MOST_LENGTHS: usize = 8;

/// Bits of cosines and sines, `[positions, dim / 2]`, by the length that a sequence is planned to reach.
#[derive(Default)]
pub(super) struct Rotations {
    tables: HashMap<usize, [Vec<u32>; 2]>,
}

impl Rotations {
    /// Cosines and sines of some positions.
    pub fn rows(&mut self, spec: &RopeSpec, context: usize, positions: Range<usize>) -> [&[u32]; 2] {
        let half = spec.dim / 2;
        if self.tables.len() >= MOST_LENGTHS && !self.tables.contains_key(&context) {
            self.tables.clear();
        }
        let tables = self.tables.entry(context).or_default();
        let have = tables[0].len() / half.max(1);
        if have < positions.end {
            let (freqs, attention) = rope::frequencies(spec, context);
            let (mut cos, mut sin) = (vec![0.0f32; half], vec![0.0f32; half]);
            for position in have..positions.end {
                rope::angles(&mut cos, &mut sin, &freqs, attention, position);
                tables[0].extend(cos.iter().map(|x| x.to_bits()));
                tables[1].extend(sin.iter().map(|x| x.to_bits()));
            }
        }
        tables.each_ref().map(|t| &t[positions.start * half..positions.end * half])
    }
}
