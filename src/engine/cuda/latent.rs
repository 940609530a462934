//! Decoding with latent attention: three launches of `latent.cu`.

use super::Engine;
use super::batch::View;
use super::fast::{LatentAttentionArgs, LatentQueryArgs, LatentValueArgs};
use super::fuse::LatentPart;
use super::launch;
use crate::engine::EngineError;
use crate::model::plan::Slot;
use crate::model::spec::Pairing;

impl Engine {
    /// Whether the latent kernels take a shape, at this number of tokens.
    pub(super) fn latent_fits(&self, part: &LatentPart, num_tok: usize) -> bool {
        let (m, up) = (&part.mla, self.store.matrix(part.up));
        let shape = launch::LATENT_RANKS.contains(&m.kv_rank) && m.rope == launch::LATENT_ROPE && m.nope <= launch::LATENT_NOPE;
        let whole = m.v.is_multiple_of(2) && up.group % 8 == 0 && up.data.is_multiple_of(16) && up.zeros == 0;
        let shared = launch::latent_attention(m.kv_rank, m.heads, num_tok, self.limits()).shared_bytes as usize;
        shape && whole && shared <= self.limits().block_shared_bytes && num_tok <= launch::DECODE_TOK
    }

    /// From queries and latents as the projections left them to the values of every head; one new token a sequence.
    pub(super) fn decode_latent(&mut self, part: &LatentPart, view: &View) -> Result<(), EngineError> {
        let (m, num_tok) = (&part.mla, view.num_tok);
        let up = self.store.matrix(part.up);
        let pages = self.cache(part.layer).keys.at(0);
        let (query, partial) = (self.work.latent_q.at(0), self.work.partial.at(0));
        let (t, h, nope, v) = (num_tok as i32, m.heads as i32, m.nope as i32, m.v as i32);
        let (max_pages, max_splits) = (view.table_stride as i32, launch::latent_splits(m.heads, num_tok) as i32);
        let args = LatentQueryArgs {
            query,
            q: self.at(Slot::Q),
            latent: self.at(Slot::K),
            pages,
            page_table: view.table,
            positions: view.positions,
            gain: self.store.matrix(part.gain).data,
            cosines: view.cosines,
            sines: view.sines,
            up,
            q_stride: (m.heads * (m.nope + m.rope)) as i32,
            latent_stride: (m.kv_rank + m.rope) as i32,
            t,
            h,
            nope,
            rope: m.rope as i32,
            v,
            max_pages,
            interleaved: (self.spec.rope.pairing == Pairing::Interleaved) as i32,
            eps: part.eps,
        };
        let name = |kernel: &str| format!("latent_{kernel}_r{}", m.kv_rank);
        self.fast.launch(&name("query"), launch::latent_query(m.kv_rank, m.heads, num_tok), &args)?;
        let (page_table, positions) = (view.table, view.positions);
        let args = LatentAttentionArgs { partial, query, pages, page_table, positions, h, max_pages, max_splits, scale: m.scale };
        self.fast.launch(&name("attention"), launch::latent_attention(m.kv_rank, m.heads, num_tok, self.limits()), &args)?;
        let (grid, rows) = launch::latent_value(m.v, m.heads, num_tok);
        let (out, out_stride, rows) = (self.at(Slot::Attn), (m.heads * m.v) as i32, rows as i32);
        let args = LatentValueArgs { out, partial, positions, up, out_stride, t, h, nope, v, max_splits, rows };
        self.fast.launch(&name("value"), grid, &args)?;
        self.work.row[Slot::Attn as usize] = m.heads * m.v;
        self.count_keys();
        Ok(())
    }
}
