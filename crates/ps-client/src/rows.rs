//! The messages of a step about rows of tables.

use shared_proto::ids::{Clock, ViewNumber};
use shared_proto::step::{RowGradients, Want, WantedRows};
use shared_proto::table::{Rows, ids_to_bytes};
use shared_proto::wire;
use shared_proto::wire::client_message::Kind as ClientKind;

use crate::error::ClientError;
use crate::row_plan::{Form, RowPart, plan};
use crate::session::Reply;
use crate::shards::{Pulling, Shards};

impl Shards {
    /// Pushes the gradients of rows.
    pub(crate) async fn send_rows(
        &mut self,
        clock: Clock,
        gradients: &[RowGradients],
        replies: &mut Vec<Reply>,
    ) -> Result<(), ClientError> {
        let lists: Vec<&WantedRows> = gradients.iter().map(|of| &*of.rows).collect();
        for message in plan(&self.map, &lists, self.wire.size(), Form::Push) {
            let part = |part: &RowPart| {
                let RowGradients { rows, values } = &gradients[part.list];
                let dimension = self.map.tables[rows.table].spec.dimension;
                let (start, end) = (part.rows.start, part.rows.end);
                let width = dimension as usize;
                let values = values.slice(start * width..end * width).to(self.wire);
                wire::Gradient {
                    block: Some(part.block.into()),
                    based_on_version: self.based_on(part.block),
                    payload: Some(Rows::payload(&rows.ids[start..end], values, dimension)),
                }
            };
            let gradients = message.parts.iter().map(part).collect();
            let origin = self.next_origin(clock);
            let sequence = origin.sequence.0;
            let push = ClientKind::Push(wire::Push {
                origin: Some(origin.into()),
                gradients,
            });
            replies.push(self.sessions[message.shard].send(sequence, push).await);
        }
        Ok(())
    }

    /// Asks for the rows that a step wants. Also sends an empty pull to each shard that this step has not pulled from
    /// yet.
    pub(crate) async fn ask_for_rows(
        &mut self,
        clock: Clock,
        view: ViewNumber,
        wants: &[Want],
        replies: &mut Vec<Pulling>,
    ) {
        let lists: Vec<&WantedRows> = wants.iter().filter_map(Want::rows).collect();
        // The server counts the bytes of `f32`.
        for message in plan(&self.map, &lists, size_of::<f32>(), Form::Pull) {
            let wanted = |part: &RowPart| wire::WantedBlock {
                block: Some(part.block.into()),
                ids: ids_to_bytes(&lists[part.list].ids[part.rows.clone()]),
                ..wire::WantedBlock::default()
            };
            let blocks = message.parts.iter().map(wanted).collect();
            let origin = self.next_origin(clock);
            let sequence = origin.sequence.0;
            let pull = ClientKind::Pull(wire::Pull {
                origin: Some(origin.into()),
                blocks,
                dtype: self.wire.into(),
                view: view.0,
            });
            let reply = self.sessions[message.shard].send(sequence, pull).await;
            let rows = message.parts;
            replies.push(Pulling { reply, rows });
        }
        self.ask_for_nothing(clock, view, replies).await;
    }

    /// Sends an empty pull to each shard that has none of the values that a step wants. So a worker pulls from each
    /// shard before it pushes to it: it never pushes to a shard that has not caught up with the newest commit, and no
    /// shard misses a commit.
    async fn ask_for_nothing(
        &mut self,
        clock: Clock,
        view: ViewNumber,
        replies: &mut Vec<Pulling>,
    ) {
        for shard in 0..self.sessions.len() {
            let mut asked = replies.iter().map(|pulling| pulling.reply.shard as usize);
            if asked.any(|asked| asked == shard) {
                continue;
            }
            let origin = self.next_origin(clock);
            let sequence = origin.sequence.0;
            let pull = ClientKind::Pull(wire::Pull {
                origin: Some(origin.into()),
                blocks: Vec::new(),
                dtype: self.wire.into(),
                view: view.0,
            });
            let reply = self.sessions[shard].send(sequence, pull).await;
            replies.push(reply.into());
        }
    }
}
