//! A rank of a group, which plays schedules over its links.

use std::cell::{Cell, RefCell};
use std::ops::Range;

use bytes::Bytes;
use shared_proto::payload::Dtype;
use shared_proto::planted;
use tokio::sync::Notify;

use crate::links::{LinkError, Links};
use crate::numbers::{combine, combine_short, round, short_to_wire, to_wire};
use crate::pieces::{PIECE_BYTES, PIECE_ELEMENTS, Pieces};
use crate::schedule::{self, Algorithm, Rank, Round};

/// The failure of a collective operation. The contents of the operation's vector are undefined afterwards, and the
/// group can do no further operation.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum CollectiveError {
    /// A peer is gone.
    #[error(transparent)]
    Link(#[from] LinkError),
    /// A peer sends another number of bytes than this rank expects, so the two ranks do different operations.
    #[error(
        "rank {rank} sends {found} bytes where {expected} are due; do all ranks have the same job?"
    )]
    Differs {
        /// The peer.
        rank: Rank,
        /// The number of bytes that the peer sent.
        found: usize,
        /// The number of bytes that this rank expected.
        expected: usize,
    },
}

impl CollectiveError {
    /// Returns the rank of the peer that caused the error.
    pub fn rank(&self) -> Rank {
        match self {
            Self::Link(error) => error.rank,
            Self::Differs { rank, .. } => *rank,
        }
    }
}

/// The number of bytes that a rank has sent and received. Sums of short vectors and [`Group::gather_bytes`] do not
/// count.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Traffic {
    /// The number of bytes handed to the links.
    pub sent: u64,
    /// The number of bytes that the links have received.
    pub received: u64,
}

/// A rank of a group. All ranks must call the same operations in the same order, with vectors of the same length unless
/// an operation says otherwise. Exceptions are messages and signals, which concern two ranks, and
/// [`Group::sum_short_among`], which concerns some of the ranks.
pub struct Group<L> {
    rank: Rank,
    ranks: usize,
    links: L,
    wire: Dtype,
    algorithm: Option<Algorithm>,
    /// The rank from which a piece is awaited.
    awaited: Cell<Option<Rank>>,
    traffic: Cell<Traffic>,
}

impl<L: Links> Group<L> {
    /// Creates rank `rank` of a group of `ranks` ranks. Reductions of `f32` vectors send numbers in the format `wire`.
    pub fn new(rank: Rank, ranks: usize, links: L, wire: Dtype) -> Self {
        Self {
            rank,
            ranks,
            links,
            wire,
            algorithm: None,
            awaited: Cell::new(None),
            traffic: Cell::default(),
        }
    }

    /// Reduces with this algorithm, whatever the size of the vector.
    #[must_use]
    pub fn by(mut self, algorithm: Algorithm) -> Self {
        self.algorithm = Some(algorithm);
        self
    }

    /// Leaves the group and returns the links.
    pub fn into_links(self) -> L {
        self.links
    }

    /// Returns this rank.
    pub fn rank(&self) -> Rank {
        self.rank
    }

    /// Returns the number of ranks.
    pub fn ranks(&self) -> usize {
        self.ranks
    }

    /// Returns the rank from which an operation awaits a piece at present, if there is one. Messages and signals do not
    /// count.
    pub fn waiting_on(&self) -> Option<Rank> {
        self.awaited.get()
    }

    /// Returns the traffic since the last call of this method, including that of failed operations.
    pub fn take_traffic(&self) -> Traffic {
        self.traffic.take()
    }

    /// Replaces each element with the sum of all ranks' elements at the same index.
    ///
    /// # Errors
    /// See [`CollectiveError`].
    pub async fn all_reduce(&self, values: &mut [f32]) -> Result<(), CollectiveError> {
        let (rank, ranks, elements) = (self.rank, self.ranks, values.len());
        let fastest = || Algorithm::for_size(elements, self.wire.size());
        let algorithm = self.algorithm.unwrap_or_else(fastest);
        let rounds = schedule::all_reduce(algorithm, rank, ranks, elements);
        self.play(&rounds, values, self.wire).await?;
        if ranks > 1 {
            // Not each rank has sent its sum, and so rounded it.
            round(values, self.wire);
        }
        Ok(())
    }

    /// Returns the sum of all ranks' short vectors. Numbers are sent and added in `f64`, whatever the wire format. A
    /// rank without numbers passes an empty vector, and need not know the length of the other vectors. The sum is empty
    /// if all vectors are empty.
    ///
    /// # Errors
    /// See [`CollectiveError`].
    pub async fn sum_short(&self, values: Vec<f64>) -> Result<Vec<f64>, CollectiveError> {
        self.sum_short_among(0..self.ranks, values).await
    }

    /// Does the same as [`Self::sum_short`] among some of the ranks, of which this rank is one. The others take no part.
    ///
    /// # Errors
    /// See [`CollectiveError`].
    pub async fn sum_short_among(
        &self,
        ranks: Range<Rank>,
        values: Vec<f64>,
    ) -> Result<Vec<f64>, CollectiveError> {
        let mut sum = values;
        // Each round is about the whole vector, whatever its length.
        for round in schedule::sum_among(self.rank, ranks) {
            let send = async {
                if let Some((peer, _)) = &round.send {
                    self.links.send(*peer, short_to_wire(&sum)).await?;
                }
                Ok::<_, CollectiveError>(())
            };
            let receive = async {
                let Some((peer, _, combine)) = round.receive else {
                    return Ok(None);
                };
                self.awaited.set(Some(peer));
                let bytes = self.links.receive(peer).await?;
                self.awaited.set(None);
                Ok(Some((peer, bytes, combine)))
            };
            // What is received may show that the operations differ. The peer is to see that too, so sending comes first.
            let ((), received) = tokio::try_join!(biased; send, receive)?;
            if let Some((rank, bytes, combine)) = received {
                let (found, expected) = (bytes.len(), size_of_val(&sum[..]));
                let fits = combine_short(&mut sum, &bytes, combine);
                let differs = CollectiveError::Differs {
                    rank,
                    found,
                    expected,
                };
                fits.ok_or(differs)?;
            }
        }
        Ok(sum)
    }

    /// Replaces each element of the segments that this rank [keeps](crate::kept_segments) with the sum of all ranks'
    /// elements at the same index. `copies` ranks keep each segment. The sums have the same bits as those of
    /// [`Self::all_reduce`]. The other elements are undefined afterwards.
    ///
    /// # Errors
    /// See [`CollectiveError`].
    pub async fn reduce_to_keepers(
        &self,
        values: &mut [f32],
        copies: usize,
    ) -> Result<(), CollectiveError> {
        let (rank, ranks, elements) = (self.rank, self.ranks, values.len());
        let fastest = || Algorithm::for_size(elements, self.wire.size());
        let algorithm = self.algorithm.unwrap_or_else(fastest);
        if copies >= ranks || algorithm != Algorithm::Ring {
            return self.all_reduce(values).await;
        }
        let rounds = schedule::reduce_to_keepers(rank, ranks, copies, elements);
        self.play(&rounds, values, self.wire).await?;
        // Not each rank has sent its sum, and so rounded it.
        round(values, self.wire);
        Ok(())
    }

    /// Copies the [segment](crate::segment) of each rank to all others, bit for bit.
    ///
    /// # Errors
    /// See [`CollectiveError`].
    pub async fn all_gather(&self, values: &mut [f32]) -> Result<(), CollectiveError> {
        let rounds = schedule::all_gather(self.rank, self.ranks, values.len());
        self.play(&rounds, values, Dtype::F32).await
    }

    /// Copies the values of `root` to all other ranks, bit for bit.
    ///
    /// # Errors
    /// See [`CollectiveError`].
    pub async fn broadcast(&self, root: Rank, values: &mut [f32]) -> Result<(), CollectiveError> {
        let rounds = schedule::broadcast(self.rank, root, self.ranks, values.len());
        self.play(&rounds, values, Dtype::F32).await
    }

    /// Copies the values of `root` to all other ranks, bit for bit, along the ring, which needs only links between
    /// neighbours.
    ///
    /// # Errors
    /// See [`CollectiveError`].
    pub async fn pass_around(&self, root: Rank, values: &mut [f32]) -> Result<(), CollectiveError> {
        let rounds = schedule::pass_around(self.rank, root, self.ranks, values.len());
        self.play(&rounds, values, Dtype::F32).await
    }

    /// Returns each rank's bytes, in rank order. Their lengths may differ.
    ///
    /// # Errors
    /// See [`CollectiveError`].
    pub async fn gather_bytes(&self, own: Bytes) -> Result<Vec<Bytes>, CollectiveError> {
        let (rank, ranks) = (self.rank, self.ranks);
        let mut lengths = vec![0.0; ranks];
        lengths[rank] = own.len() as f64;
        let lengths = self.sum_short(lengths).await?;
        let mut all = vec![Bytes::new(); ranks];
        all[rank] = own;
        let (next, before) = ((rank + 1) % ranks, (rank + ranks - 1) % ranks);
        // Each rank forwards to the next one what it received in the round before.
        for round in 1..ranks {
            let mut leaving = all[(rank + ranks + 1 - round) % ranks].clone();
            let send = async {
                while !leaving.is_empty() {
                    let piece = leaving.split_to(leaving.len().min(PIECE_BYTES));
                    self.links.send(next, piece).await?;
                }
                Ok::<_, CollectiveError>(())
            };
            let of = (rank + ranks - round) % ranks;
            let expected = lengths[of] as usize;
            let receive = async {
                let mut bytes = Vec::new();
                while bytes.len() < expected {
                    self.awaited.set(Some(before));
                    let piece = self.links.receive(before).await?;
                    self.awaited.set(None);
                    let found = bytes.len() + piece.len();
                    if piece.is_empty() || found > expected {
                        return Err(CollectiveError::Differs {
                            rank: before,
                            found,
                            expected,
                        });
                    }
                    bytes.extend_from_slice(&piece);
                }
                Ok(bytes)
            };
            let ((), received) = tokio::try_join!(send, receive)?;
            all[of] = received.into();
        }
        Ok(all)
    }

    /// Sends a message to a rank, which must call [`Self::receive_message`]. Messages may travel in both directions at
    /// the same time, but the two ranks must do no other operation meanwhile.
    ///
    /// # Errors
    /// See [`CollectiveError`].
    pub async fn send_message(&self, to: Rank, mut message: Bytes) -> Result<(), CollectiveError> {
        let length = Bytes::copy_from_slice(&(message.len() as u64).to_le_bytes());
        self.count(length.len() + message.len(), 0);
        self.links.send(to, length).await?;
        while !message.is_empty() {
            let piece = message.split_to(message.len().min(PIECE_BYTES));
            self.links.send(to, piece).await?;
        }
        Ok(())
    }

    /// Receives the next message of a rank.
    ///
    /// # Errors
    /// See [`CollectiveError`].
    pub async fn receive_message(&self, from: Rank) -> Result<Bytes, CollectiveError> {
        let length = self.links.receive(from).await?;
        let differs = |found, expected| CollectiveError::Differs {
            rank: from,
            found,
            expected,
        };
        let Ok(bytes) = <[u8; 8]>::try_from(&length[..]) else {
            return Err(differs(length.len(), size_of::<u64>()));
        };
        let expected = u64::from_le_bytes(bytes) as usize;
        // Memory is taken as pieces come: a peer may announce more than it sends.
        let mut message = Vec::with_capacity(expected.min(PIECE_BYTES));
        while message.len() < expected {
            let piece = self.links.receive(from).await?;
            let found = message.len().saturating_add(piece.len());
            if piece.is_empty() || found > expected {
                return Err(differs(found, expected));
            }
            message.extend_from_slice(&piece);
        }
        self.count(0, size_of::<u64>() + message.len());
        Ok(message.into())
    }

    /// Sends a signal to a rank, which must call [`Self::receive_signal`]. Signals may travel in both directions at the
    /// same time, but the two ranks must do no other operation meanwhile.
    ///
    /// # Errors
    /// See [`CollectiveError`].
    pub async fn send_signal(&self, to: Rank, signal: u8) -> Result<(), CollectiveError> {
        self.count(1, 0);
        self.links.send(to, vec![signal].into()).await?;
        Ok(())
    }

    /// Receives the next signal of a rank. The future may be dropped, and the method called again.
    ///
    /// # Errors
    /// See [`CollectiveError`].
    pub async fn receive_signal(&self, from: Rank) -> Result<u8, CollectiveError> {
        let piece = self.links.receive(from).await?;
        self.count(0, piece.len());
        match piece[..] {
            [signal] => Ok(signal),
            _ => Err(CollectiveError::Differs {
                rank: from,
                found: piece.len(),
                expected: 1,
            }),
        }
    }

    /// Returns once all ranks have called this.
    ///
    /// # Errors
    /// See [`CollectiveError`].
    pub async fn barrier(&self) -> Result<(), CollectiveError> {
        let rounds = schedule::all_reduce(Algorithm::Doubling, self.rank, self.ranks, 1);
        self.play(&rounds, &mut [0.0], Dtype::F32).await
    }

    /// Sends and receives the pieces of a schedule, each piece as soon as the pieces that it depends on are done.
    async fn play(
        &self,
        rounds: &[Round],
        values: &mut [f32],
        wire: Dtype,
    ) -> Result<(), CollectiveError> {
        let pieces = Pieces::new(rounds, PIECE_ELEMENTS);
        let values = RefCell::new(values);
        let (sent, received) = (Count::default(), Count::default());
        let send = async {
            for piece in pieces.outgoing {
                received.reaches(piece.after).await;
                let bytes = to_wire(&mut values.borrow_mut()[piece.range], wire);
                sent.add_one();
                self.count(bytes.len(), 0);
                self.links.send(piece.peer, bytes).await?;
            }
            Ok(())
        };
        let receive = async {
            for piece in pieces.incoming {
                self.awaited.set(Some(piece.peer));
                let expected = piece.range.len() * wire.size();
                let bytes = match self.links.receive(piece.peer).await {
                    Err(_) if planted!(MissingPieces) => Bytes::from(vec![0; expected]),
                    received => received?,
                };
                self.awaited.set(None);
                self.count(0, bytes.len());
                if bytes.len() != expected {
                    return Err(CollectiveError::Differs {
                        rank: piece.peer,
                        found: bytes.len(),
                        expected,
                    });
                }
                sent.reaches(piece.after).await;
                combine(
                    &mut values.borrow_mut()[piece.range],
                    bytes,
                    wire,
                    piece.combine,
                );
                received.add_one();
            }
            Ok(())
        };
        // See `sum_short`.
        tokio::try_join!(biased; send, receive)?;
        Ok(())
    }

    fn count(&self, sent: usize, received: usize) {
        let mut traffic = self.traffic.get();
        traffic.sent += sent as u64;
        traffic.received += received as u64;
        self.traffic.set(traffic);
    }
}

/// A counter of pieces on which the other half of an operation can wait.
#[derive(Default)]
struct Count {
    count: Cell<usize>,
    changed: Notify,
}

impl Count {
    fn add_one(&self) {
        self.count.set(self.count.get() + 1);
        self.changed.notify_one();
    }

    async fn reaches(&self, count: usize) {
        while self.count.get() < count {
            self.changed.notified().await;
        }
    }
}
