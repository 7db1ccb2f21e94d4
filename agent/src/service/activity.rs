//! Records the time of every call, for the idle timer.

use std::sync::Arc;

use async_trait::async_trait;
use ttrpc::r#async::{MethodHandler, TtrpcContext};
use ttrpc::proto::{Request, Response};

use crate::idle::Idle;

pub(super) struct Tracked {
    pub(super) idle: Arc<Idle>,
    pub(super) serve: Box<dyn MethodHandler + Send + Sync>,
}

#[async_trait]
impl MethodHandler for Tracked {
    async fn handler(&self, context: TtrpcContext, request: Request) -> ttrpc::Result<Response> {
        self.idle.called();
        self.serve.handler(context, request).await
    }
}
