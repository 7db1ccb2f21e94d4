//! `firstlight.BootRecord`.

use std::sync::Arc;

use async_trait::async_trait;
use firstlight_agent_api::firstlight::{BootRecordReply, GetBootRecordRequest};
use firstlight_agent_api::firstlight_ttrpc::BootRecord;
use ttrpc::Code;
use ttrpc::r#async::TtrpcContext;

use crate::control::Control;
use crate::error::Error;

pub(super) struct Record(pub(super) Option<Arc<Control>>);

#[async_trait]
impl BootRecord for Record {
    async fn get(&self, _: &TtrpcContext, _: GetBootRecordRequest) -> ttrpc::Result<BootRecordReply> {
        let missing = || Error::new(Code::UNAVAILABLE, "no boot record: the agent runs without PID 1");
        let control = self.0.as_ref().ok_or_else(missing)?;
        Ok(BootRecordReply { json: control.record().await?, ..Default::default() })
    }
}
