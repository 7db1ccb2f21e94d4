//! What clients of the control socket say.

use firstlight_control::{FromInit, ToInit};

use super::Supervisor;
use crate::clock::now_us;
use crate::control::ClientId;
use crate::record::cut;
use crate::shutdown::Goal;

impl Supervisor {
    pub(super) fn hear_clients(&mut self) {
        let Some(server) = &mut self.server else { return };
        for (client, message) in server.turn() {
            self.hear_client(client, message);
            self.drain();
        }
    }

    fn hear_client(&mut self, client: ClientId, message: ToInit) {
        match message {
            ToInit::Subscribe => {
                let now = self.gpu_message();
                if let Some(server) = &mut self.server {
                    server.subscribe(client);
                    server.send(client, &now);
                }
            }
            ToInit::Listening { at_us } => self.agent_listens(at_us.min(now_us())),
            ToInit::Event { at_us, what, object, detail } => {
                self.recorder.event(at_us.min(now_us()), &cut(what), &cut(object), &cut(detail));
            }
            ToInit::Record => {
                self.read_whole_log();
                self.save();
                let record = FromInit::Record(Box::new(self.recorder.record().clone()));
                if let Some(server) = &mut self.server {
                    server.send(client, &record);
                }
            }
            ToInit::PowerOff { reason } => self.begin_shutdown(Goal::PowerOff, &cut(reason)),
        }
    }

    fn gpu_message(&self) -> FromInit {
        FromInit::Gpus { scanned: self.scanned, gpus: self.recorder.record().gpus.clone() }
    }

    /// Tells all subscribers how the GPUs stand.
    pub(super) fn publish_gpus(&mut self) {
        let message = self.gpu_message();
        if let Some(server) = &mut self.server {
            server.publish(&message);
        }
    }
}
