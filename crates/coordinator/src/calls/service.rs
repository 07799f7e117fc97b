//! The gRPC service: reads a request, asks the cluster under its lock, publishes the changes.

use std::time::Instant;

use bytes::Bytes;
use cluster::limits::{check_addresses, check_lengths};
use cluster::messages::{read_data, take_report};
use cluster::{Cluster, Initialization, Joined, ModelSpecs};
use futures_util::StreamExt;
use futures_util::stream::BoxStream;
use shared_proto::blocks::VariableSpec;
use shared_proto::ids::{Origin, Role, Task};
use shared_proto::protocol::PROTOCOL_VERSION;
use shared_proto::refusal::{Reason, Refusal};
use shared_proto::table::TableSpec;
use shared_proto::task;
use shared_proto::view::{JobPhase, View};
use shared_proto::wire;
use shared_proto::wire::coordinator_server::Coordinator;
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Request, Response, Status, Streaming};

use super::current_job::{CurrentJob, of_member, refused};
use super::jobs::{JobCalls, failed, no_queue};
use super::origin::CallOrigin;
use crate::keeping::shared::LONG_POLL;

type Answer<T> = Result<Response<T>, Status>;

/// The gRPC service.
pub(crate) struct Service {
    /// The current job, and the credentials that its callers need.
    pub(crate) current_job: CurrentJob,
    /// The jobs of a long-lived cluster; `None` if the coordinator serves one job alone.
    pub(crate) queue: Option<JobCalls>,
}

impl Service {
    fn queue(&self) -> Result<&JobCalls, Status> {
        self.queue.as_ref().ok_or_else(|| refused(no_queue()))
    }

    /// Returns the epoch of the newest published view.
    fn epoch(&self) -> Result<u64, Status> {
        Ok(self.current_job.shared()?.views.borrow().epoch.0)
    }

    /// Asks the cluster on behalf of a member. Checks under the same lock that the caller is a member.
    async fn ask_as<T>(
        &self,
        from: CallOrigin<'_>,
        ask: impl FnMut(&mut Cluster, Instant, &Origin) -> Result<T, Refusal>,
    ) -> Result<T, Status> {
        let ask = of_member(self.current_job.origin(&from)?, ask);
        self.current_job.shared()?.ask(ask).await.map_err(refused)
    }

    /// Asks the cluster on behalf of a member until `satisfies` accepts the answer or `LONG_POLL` has passed. Returns
    /// the last answer.
    async fn ask_as_until<T>(
        &self,
        from: CallOrigin<'_>,
        ask: impl FnMut(&mut Cluster, Instant, &Origin) -> Result<T, Refusal>,
        satisfies: impl Fn(&T) -> bool,
    ) -> Result<T, Status> {
        let ask = of_member(self.current_job.origin(&from)?, ask);
        let shared = self.current_job.shared()?;
        shared.ask_until(ask, satisfies).await.map_err(refused)
    }
}

/// Returns the next message of a stream of views. With `differences`, the message leaves out the workers if they equal
/// `known`; otherwise `known` is set to them.
fn next_view(view: &View, known: &mut Vec<Task>, differences: bool) -> wire::View {
    if !differences {
        return view.into();
    }
    let message = view.difference(known);
    if !message.same_workers {
        known.clone_from(&view.workers);
    }
    message
}

/// Returns whether there is no job, or only one that has ended, so that members wait for the next job.
fn has_no_job_at_work(status: &wire::Status) -> bool {
    matches!(
        status.phase(),
        JobPhase::Idle | JobPhase::Done | JobPhase::Failed
    )
}

#[tonic::async_trait]
impl Coordinator for Service {
    async fn register(
        &self,
        request: Request<wire::RegisterRequest>,
    ) -> Answer<wire::RegisterReply> {
        let (_, extensions, request) = request.into_parts();
        if request.protocol_version != PROTOCOL_VERSION {
            return Err(refused(Refusal::new(
                Reason::WrongProtocolVersion,
                format!(
                    "{:?} speaks protocol version {}, the coordinator {PROTOCOL_VERSION}; use the same release everywhere",
                    request.identity, request.protocol_version
                ),
            )));
        }
        check_lengths(&request).map_err(refused)?;
        let role = Role::try_from(request.role).map_err(refused)?;
        check_addresses(role, &request).map_err(refused)?;
        self.current_job.security.check_role(&extensions, role)?;
        let active = self.current_job.slot.active().map_err(refused)?;
        let shared = &active.shared;
        let process = request.process;
        let task = shared
            .ask(|cluster, now| cluster.register(now, role, request))
            .await
            .map_err(refused)?;
        if let Some(jobs) = &self.queue {
            jobs.waiting.registered(process);
        }
        tracing::info!(%task, generation = task.generation.0, "registered");
        let view = shared.views.borrow().number.0;
        let reply = shared.look(|cluster, _| wire::RegisterReply {
            job: cluster.job().name.clone(),
            task: Some(task.into()),
            lease_milliseconds: cluster.lease().as_millis() as u64,
            view,
            job_toml: cluster.job().to_toml(),
            checkpoints: cluster
                .place()
                .map_or_else(String::new, |place| place.location.clone()),
            probe: cluster
                .place()
                .map_or_else(String::new, |place| place.run_id.clone()),
            receipt_key: match role {
                Role::Ps => Bytes::copy_from_slice(&cluster.receipt_key().0),
                Role::Worker | Role::Coordinator => Bytes::new(),
            },
            run: cluster.run_number().0,
            run_folder: active.folder.clone(),
            has_queue: self.queue.is_some(),
        });
        Ok(Response::new(reply))
    }

    async fn heartbeat(
        &self,
        request: Request<wire::HeartbeatRequest>,
    ) -> Answer<wire::HeartbeatReply> {
        let (_, extensions, request) = request.into_parts();
        let origin =
            self.current_job
                .origin(&CallOrigin::new(&request.origin, &extensions, "Heartbeat"))?;
        // A heartbeat makes no work available, so it wakes no waiting call.
        let beat = of_member(origin, |cluster, now, origin| {
            cluster.heartbeat(now, origin.task);
            Ok(())
        });
        let shared = self.current_job.shared()?;
        // The numbers in the answer are those of a published view, so it does not wait for the disk.
        let (answer, _) = shared.ask_fast_quietly(beat, Result::is_ok).await;
        answer.map_err(refused)?;
        let view = shared.views.borrow();
        Ok(Response::new(wire::HeartbeatReply {
            view: view.number.0,
            phase: view.phase.into(),
            error: view.error.clone(),
            epoch: view.epoch.0,
        }))
    }

    async fn drain(&self, request: Request<wire::DrainRequest>) -> Answer<wire::DrainReply> {
        let (_, extensions, request) = request.into_parts();
        let done = self
            .ask_as_until(
                CallOrigin::new(&request.origin, &extensions, "Drain").server(),
                |cluster, now, origin| Ok(cluster.drain(now, origin.task)),
                |done| *done,
            )
            .await?;
        Ok(Response::new(wire::DrainReply { done }))
    }

    async fn leave(&self, request: Request<wire::LeaveRequest>) -> Answer<wire::LeaveReply> {
        let (_, extensions, request) = request.into_parts();
        self.ask_as(
            CallOrigin::new(&request.origin, &extensions, "Leave"),
            |cluster, now, origin| {
                cluster.leave(now, origin.task, &request);
                Ok(())
            },
        )
        .await?;
        Ok(Response::new(wire::LeaveReply {}))
    }

    async fn get_job(&self, request: Request<wire::JobRequest>) -> Answer<wire::JobReply> {
        let wire::JobRequest { wait, waiting } = request.into_inner();
        if wait {
            if let (Some(jobs), Some(member)) = (&self.queue, waiting) {
                jobs.waiting.saw(member, Instant::now());
            }
            let _ = tokio::time::timeout(LONG_POLL, self.current_job.slot.at_work()).await;
        }
        let reply = self
            .current_job
            .shared()?
            .look(|cluster, _| wire::JobReply {
                job: cluster.job().name.clone(),
                job_toml: cluster.job().to_toml(),
                run: cluster.run_number().0,
                phase: cluster.view().phase.into(),
            });
        Ok(Response::new(reply))
    }

    async fn get_shard_map(
        &self,
        request: Request<wire::ShardMapRequest>,
    ) -> Answer<wire::ShardMap> {
        let (_, extensions, request) = request.into_parts();
        let origin = match &request.origin {
            Some(_) => Some(self.current_job.origin(&CallOrigin::new(
                &request.origin,
                &extensions,
                "GetShardMap",
            ))?),
            None => None,
        };
        // Returned only once it is persisted.
        let map = |cluster: &mut Cluster, _| {
            origin.map_or(Ok(()), |origin| cluster.admit(&origin))?;
            cluster.shard_map().map(wire::ShardMap::from)
        };
        let map = self.current_job.shared()?.ask_quietly(map).await;
        map.map(Response::new).map_err(refused)
    }

    async fn register_variables(
        &self,
        request: Request<wire::RegisterVariablesRequest>,
    ) -> Answer<wire::RegisterVariablesReply> {
        let (_, extensions, request) = request.into_parts();
        let specs = request.variables.iter().map(VariableSpec::read);
        let variables = specs.collect::<Result<_, _>>().map_err(refused)?;
        let tables = request.tables.iter().map(TableSpec::read);
        let tables = tables.collect::<Result<_, _>>().map_err(refused)?;
        let model = ModelSpecs { variables, tables };
        let data = read_data(&request).map_err(refused)?;
        let initialization = self
            .ask_as_until(
                CallOrigin::new(&request.origin, &extensions, "RegisterVariables").worker(),
                |cluster, now, origin| {
                    cluster.register_variables(now, origin.task, model.clone(), data.clone())
                },
                |answer| !matches!(answer, Initialization::Pending(_)),
            )
            .await?;
        let shared = self.current_job.shared()?;
        let view = shared.views.borrow().number.0;
        let map = |cluster: &mut Cluster, _| cluster.shard_map().ok().map(Into::into);
        let shard_map = shared.ask_quietly(map).await;
        let (initialization, waiting_for) = match initialization {
            Initialization::Yours => (wire::Initialization::Yours, String::new()),
            Initialization::Pending(what) => (wire::Initialization::Pending, what),
            Initialization::Done => (wire::Initialization::Done, String::new()),
        };
        Ok(Response::new(wire::RegisterVariablesReply {
            shard_map,
            view,
            initialization: initialization.into(),
            waiting_for,
        }))
    }

    async fn finish_initialization(
        &self,
        request: Request<wire::FinishInitializationRequest>,
    ) -> Answer<wire::FinishInitializationReply> {
        let (_, extensions, request) = request.into_parts();
        let from = CallOrigin::new(&request.origin, &extensions, "FinishInitialization").worker();
        self.ask_as(from, |cluster, _, origin| {
            cluster.finish_initialization(origin.task)
        })
        .await?;
        Ok(Response::new(wire::FinishInitializationReply {}))
    }

    async fn join_ring(
        &self,
        request: Request<wire::JoinRingRequest>,
    ) -> Answer<wire::JoinRingReply> {
        let (_, extensions, request) = request.into_parts();
        let joined = self
            .ask_as_until(
                CallOrigin::new(&request.origin, &extensions, "JoinRing").worker(),
                |cluster, now, origin| cluster.join_ring(now, origin, &request),
                |joined| !matches!(joined, Joined::Pending(_)),
            )
            .await?;
        Ok(Response::new(match joined {
            Joined::Ring(ring) => wire::JoinRingReply {
                ring: Some(ring),
                ..Default::default()
            },
            Joined::Pending(waiting_for) => wire::JoinRingReply {
                waiting_for,
                ..Default::default()
            },
            Joined::Ended => wire::JoinRingReply {
                ended: true,
                ..Default::default()
            },
        }))
    }

    async fn lease_work(
        &self,
        request: Request<wire::LeaseWorkRequest>,
    ) -> Answer<wire::LeaseWorkReply> {
        let (_, extensions, request) = request.into_parts();
        let reply = self.current_job.lease_work(&extensions, &request).await?;
        Ok(Response::new(reply))
    }

    async fn finish_step(
        &self,
        request: Request<wire::FinishStepRequest>,
    ) -> Answer<wire::FinishStepReply> {
        let (_, extensions, request) = request.into_parts();
        let reply = self.current_job.finish_step(&extensions, &request).await?;
        Ok(Response::new(reply))
    }

    type FinishStepsStream = BoxStream<'static, Result<wire::FinishStepReply, Status>>;

    async fn finish_steps(
        &self,
        request: Request<Streaming<wire::FinishStepRequest>>,
    ) -> Answer<Self::FinishStepsStream> {
        let (_, extensions, requests) = request.into_parts();
        let replies = self
            .current_job
            .clone()
            .finish_steps(extensions, requests)?;
        Ok(Response::new(replies.boxed()))
    }

    async fn report(&self, request: Request<wire::ReportRequest>) -> Answer<wire::ReportReply> {
        let (_, extensions, request) = request.into_parts();
        let wire::ReportRequest { origin, mut report } = request;
        let from = CallOrigin::new(&origin, &extensions, "Report");
        let waits = matches!(report, Some(wire::report_request::Report::Wait(_)));
        // The last part of a norm commits the step, and so leaves the fast path.
        let is_norm = matches!(report, Some(wire::report_request::Report::Norm(_)));
        let take = of_member(self.current_job.origin(&from)?, |cluster, now, origin| {
            take_report(cluster, now, origin, report.take())
        });
        let shared = self.current_job.shared()?;
        // Many workers may wait for the same one. Their reports wake no waiting call.
        let counts = match (waits, is_norm) {
            (true, _) => shared.ask_fast_quietly(take, Result::is_ok).await.0,
            (false, true) => shared.ask_fast(take).await,
            (false, false) => shared.ask(take).await,
        };
        let counts = counts.map_err(refused)?;
        Ok(Response::new(wire::ReportReply {
            epoch: self.epoch()?,
            not_counted: !counts,
        }))
    }

    type WatchStream = ReceiverStream<Result<wire::View, Status>>;

    async fn watch(&self, request: Request<wire::WatchRequest>) -> Answer<Self::WatchStream> {
        let (_, extensions, request) = request.into_parts();
        let origin =
            self.current_job
                .origin(&CallOrigin::new(&request.origin, &extensions, "Watch"))?;
        let active = self.current_job.slot.active().map_err(refused)?;
        let admitted = active.shared.look(|cluster, _| cluster.admit(&origin));
        admitted.map_err(refused)?;
        // The channel holds one view: a slow reader gets the newest one when it is ready.
        let (sender, stream) = mpsc::channel(1);
        let differences = request.differences;
        let mut views = active.shared.views();
        let over = active.over.clone();
        task::spawn(async move {
            let forward = async {
                let mut known = Vec::new();
                loop {
                    let view = next_view(&views.borrow_and_update(), &mut known, differences);
                    if sender.send(Ok(view)).await.is_err() || views.changed().await.is_err() {
                        return;
                    }
                }
            };
            over.run_until_cancelled(forward).await;
        });
        Ok(Response::new(ReceiverStream::new(stream)))
    }

    async fn stop(&self, request: Request<wire::StopRequest>) -> Answer<wire::StopReply> {
        let (_, extensions, request) = request.into_parts();
        self.current_job
            .security
            .check_role(&extensions, Role::Worker)?;
        let stop = |cluster: &mut Cluster, _| cluster.stop(&request.job);
        self.current_job
            .shared()?
            .ask(stop)
            .await
            .map_err(refused)?;
        Ok(Response::new(wire::StopReply {}))
    }

    async fn get_status(&self, _: Request<wire::StatusRequest>) -> Answer<wire::Status> {
        let mut status = match (self.current_job.shared(), &self.queue) {
            (Ok(shared), _) => shared.look(|cluster, now| cluster.status(now)),
            (Err(_), Some(_)) => wire::Status {
                phase: JobPhase::Idle.into(),
                ..wire::Status::default()
            },
            (Err(no_job), None) => return Err(no_job),
        };
        if let Some(jobs) = self.queue.as_ref().filter(|_| has_no_job_at_work(&status)) {
            jobs.waiting.add_to(&mut status, Instant::now());
        }
        Ok(Response::new(status))
    }

    async fn submit_job(
        &self,
        request: Request<wire::SubmitJobRequest>,
    ) -> Answer<wire::SubmitJobReply> {
        let (_, extensions, request) = request.into_parts();
        self.current_job
            .security
            .check_role(&extensions, Role::Worker)?;
        let submitted = self.queue()?.submit(request).await;
        let reply = submitted.map_err(|error| failed(error, refused))?;
        Ok(Response::new(reply))
    }

    async fn list_jobs(
        &self,
        request: Request<wire::ListJobsRequest>,
    ) -> Answer<wire::ListJobsReply> {
        let listed = self
            .queue()?
            .list(request.into_inner(), &self.current_job.slot);
        let jobs = listed.map_err(refused)?;
        Ok(Response::new(wire::ListJobsReply { jobs }))
    }

    async fn read_records(
        &self,
        request: Request<wire::ReadRecordsRequest>,
    ) -> Answer<wire::ReadRecordsReply> {
        let records = self.queue()?.records(request.get_ref()).await?;
        Ok(Response::new(records))
    }

    async fn cancel_job(
        &self,
        request: Request<wire::CancelJobRequest>,
    ) -> Answer<wire::CancelJobReply> {
        let (_, extensions, request) = request.into_parts();
        self.current_job
            .security
            .check_role(&extensions, Role::Worker)?;
        let cancelled = self.queue()?.cancel(request, &self.current_job.slot).await;
        let jobs = cancelled.map_err(|error| failed(error, refused))?;
        Ok(Response::new(wire::CancelJobReply {
            job: jobs.into_iter().next(),
        }))
    }
}
