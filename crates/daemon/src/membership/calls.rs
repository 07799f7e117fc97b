//! The calls of members to the coordinator. Each goes through [`Coordinator::call`].

use std::future::Future;

use shared_proto::ids::Origin;
use shared_proto::task::boxed;
use shared_proto::wire;
use tonic::{Response, Status};

use super::MembershipError;
use super::coordinator::{Calls, Coordinator};

impl Coordinator {
    /// Makes a call, with a copy of the request for each attempt.
    pub(super) async fn send<Q, T, F>(
        &self,
        request: Q,
        call: impl Fn(Calls, Q) -> F,
    ) -> Result<T, MembershipError>
    where
        Q: Clone,
        F: Future<Output = Result<Response<T>, Status>>,
    {
        self.call(|client| call(client, request.clone())).await
    }

    /// Registers a worker's variables and data.
    ///
    /// # Errors
    /// See the variants of [`MembershipError`].
    #[boxed]
    pub async fn register_variables(
        &self,
        request: wire::RegisterVariablesRequest,
    ) -> Result<wire::RegisterVariablesReply, MembershipError> {
        let call =
            |mut client: Calls, request| async move { client.register_variables(request).await };
        self.send(request, call).await
    }

    /// Reports that every shard has its initial values.
    ///
    /// # Errors
    /// See the variants of [`MembershipError`].
    #[boxed]
    pub async fn finish_initialization(&self, origin: Origin) -> Result<(), MembershipError> {
        let request = wire::FinishInitializationRequest {
            origin: Some(origin.into()),
        };
        let call =
            |mut client: Calls, request| async move { client.finish_initialization(request).await };
        self.send(request, call).await.map(drop)
    }

    /// Fetches the shard map.
    ///
    /// # Errors
    /// See the variants of [`MembershipError`].
    #[boxed]
    pub async fn shard_map(&self, origin: Origin) -> Result<wire::ShardMap, MembershipError> {
        let request = wire::ShardMapRequest {
            origin: Some(origin.into()),
        };
        let call = |mut client: Calls, request| async move { client.get_shard_map(request).await };
        self.send(request, call).await
    }

    /// Asks for a place in the ring of workers.
    ///
    /// # Errors
    /// See the variants of [`MembershipError`].
    #[boxed]
    pub async fn join_ring(
        &self,
        request: wire::JoinRingRequest,
    ) -> Result<wire::JoinRingReply, MembershipError> {
        let call = |mut client: Calls, request| async move { client.join_ring(request).await };
        self.send(request, call).await
    }

    /// Asks for work. `copied` is the newest checkpoint for which this worker has copied its values; none if it has
    /// copied none.
    ///
    /// # Errors
    /// See the variants of [`MembershipError`].
    #[boxed]
    pub async fn lease_work(
        &self,
        origin: Origin,
        copied: Option<u64>,
    ) -> Result<wire::LeaseWorkReply, MembershipError> {
        let request = wire::LeaseWorkRequest {
            origin: Some(origin.into()),
            copied,
        };
        let call = |mut client: Calls, request| async move { client.lease_work(request).await };
        self.send(request, call).await
    }

    /// Sends a report.
    ///
    /// # Errors
    /// See the variants of [`MembershipError`].
    #[boxed]
    pub async fn report(
        &self,
        origin: Origin,
        report: wire::report_request::Report,
    ) -> Result<(), MembershipError> {
        self.send_report(origin, report).await.map(drop)
    }

    /// Reports an evaluation. Returns false if the evaluation does not count, because the job has ended or the ring has
    /// changed since.
    ///
    /// # Errors
    /// See the variants of [`MembershipError`].
    #[boxed]
    pub async fn report_evaluation(
        &self,
        origin: Origin,
        report: wire::EvaluationReport,
    ) -> Result<bool, MembershipError> {
        let report = wire::report_request::Report::Evaluation(report);
        let reply = self.send_report(origin, report).await?;
        Ok(!reply.not_counted)
    }

    async fn send_report(
        &self,
        origin: Origin,
        report: wire::report_request::Report,
    ) -> Result<wire::ReportReply, MembershipError> {
        let request = wire::ReportRequest {
            origin: Some(origin.into()),
            report: Some(report),
        };
        let call = |mut client: Calls, request| async move { client.report(request).await };
        self.send(request, call).await
    }

    /// Ends a job early: the workers finish their data first.
    ///
    /// # Errors
    /// See the variants of [`MembershipError`].
    #[boxed]
    pub async fn stop(&self, job: String) -> Result<(), MembershipError> {
        let request = wire::StopRequest { job };
        let call = |mut client: Calls, request| async move { client.stop(request).await };
        self.send(request, call).await.map(drop)
    }

    /// Returns the state of the job, for people.
    ///
    /// # Errors
    /// See the variants of [`MembershipError`].
    #[boxed]
    pub async fn status(&self) -> Result<wire::Status, MembershipError> {
        let call = |mut client: Calls, request| async move { client.get_status(request).await };
        self.send(wire::StatusRequest {}, call).await
    }
}
